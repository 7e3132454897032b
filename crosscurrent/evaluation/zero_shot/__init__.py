"""Zero-shot scores on lm-evaluation-harness's tasks, from the hub or from local files."""

from crosscurrent.evaluation.zero_shot.local_files import LOCAL_FILES, LocalFile, checksum, read_rows
from crosscurrent.evaluation.zero_shot.scoring import TaskScores, mean_score, score_tasks
from crosscurrent.evaluation.zero_shot.suite import SUITE, TASKS, load_tasks, task_names

__all__ = [
    "LOCAL_FILES",
    "SUITE",
    "TASKS",
    "LocalFile",
    "TaskScores",
    "checksum",
    "load_tasks",
    "mean_score",
    "read_rows",
    "score_tasks",
    "task_names",
]
