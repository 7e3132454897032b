"""Scores of what a model writes: problems are put to it, its outputs are judged and kept, and the scores get intervals."""

from crosscurrent.evaluation.answering.asking import Session, answer_problems, score_answers
from crosscurrent.evaluation.answering.header import refuse_incomparable
from crosscurrent.evaluation.answering.records import Answers, Record, read_answers
from crosscurrent.evaluation.answering.settings import AnsweringSettings
from crosscurrent.evaluation.answering.statistics import Comparison, Estimate, compare, pass_at_k, summary

__all__ = [
    "AnsweringSettings",
    "Answers",
    "Comparison",
    "Estimate",
    "Record",
    "Session",
    "answer_problems",
    "compare",
    "pass_at_k",
    "read_answers",
    "refuse_incomparable",
    "score_answers",
    "summary",
]
