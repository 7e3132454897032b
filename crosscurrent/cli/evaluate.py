"""`crosscurrent evaluate`"""

import importlib.util
import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class PromptFormat(StrEnum):
    chat = "chat"
    plain = "plain"


class SplitName(StrEnum):
    train = "train"
    validation = "validation"
    test = "test"


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a folder, or an id on the Hugging Face hub.")
    ],
    tasks: Annotated[
        str,
        typer.Option(
            metavar="TASK,...",
            help="Some of arc_easy, arc_challenge, hellaswag, piqa, winogrande, openbookqa, boolq (zero_shot: all); or "
            "reasoning tasks, such as gsm8k,variable_assignment:depth=5 (docs/evaluation.md).",
        ),
    ] = "zero_shot",
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder of local files, which some tasks have (docs/evaluation.md).", show_default="the hub"
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, show_default="all", help="Score the first so many examples of each task.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Answers per pass. It changes no score but by rounding.")] = 8,
    solver: Annotated[
        str,
        typer.Option(
            metavar="SOLVER",
            help="configured: the model's; exact: token by token; or JSON, as recipes write a solver.",
        ),
    ] = "configured",
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; auto: as they are saved.")] = Dtype.auto,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            show_default="none",
            help="A new folder for scores and records of each example. With reasoning tasks the same command goes on there.",
        ),
    ] = None,
    split: Annotated[
        SplitName | None, typer.Option(show_default="test", help="Reasoning tasks: which problems.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, show_default="the task's", help="Reasoning tasks: longest output.")
    ] = None,
    prompt_format: Annotated[
        PromptFormat | None,
        typer.Option(show_default="the task's", help="Reasoning tasks: ask as a chat, or as plain text."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, show_default="1", help="Reasoning tasks: outputs of each problem, for pass@k."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, show_default="0", help="Reasoning tasks: 0 is greedy, 1 draws as the model says."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, show_default="1.0", help="With a temperature: among the likeliest of this total share."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(show_default="0", help="With a temperature: of the random draws.")] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            show_default="none",
            help="Reasoning tasks: the output of an earlier evaluation, to compare with, problem by problem.",
        ),
    ] = None,
) -> None:
    """Score a model on multiple-choice tasks, or on reasoning tasks by what it writes.

    Zero-shot tasks: each answer is scored by its log-likelihood after the question, with the prompts of
    lm-evaluation-harness and by its code. acc is the share of questions whose right answer is the likeliest; acc_norm
    divides by the answers' lengths. The mean takes acc_norm where a task has it.

    Reasoning tasks: the model writes an answer to each problem, which is read and judged. Options of a task follow its name,
    as in name:key=value:key=value. Intervals are bootstrapped over problems.

    OUTPUT gets scores.json, and a line per example in TASK.jsonl.

    \b
    Example: crosscurrent evaluate retrofitted
             crosscurrent evaluate retrofitted --tasks arc_easy,piqa --limit 200 --output scores
             crosscurrent evaluate retrofitted --tasks hellaswag --data folder --solver exact
             crosscurrent evaluate retrofitted --tasks piqa --solver '{"name": "jacobi", "iterations": 8}'
             crosscurrent evaluate smollm2-135m --tasks variable_assignment:depth=2 --limit 200 --output base
             crosscurrent evaluate retrofitted --tasks variable_assignment:depth=2 --limit 200 --baseline base
             crosscurrent evaluate retrofitted --tasks variable_assignment --samples 8 --temperature 0.7
    """
    words = [word.strip() for word in tasks.split(",") if word.strip()]
    sampling = {"samples": samples, "temperature": temperature, "top-p": top_p, "seed": seed}
    for_answers = {
        "split": split,
        "max-new-tokens": max_new_tokens,
        "prompt-format": prompt_format,
        "baseline": baseline,
    }
    if not _are_reasoning_tasks(words):
        _refuse_options(for_answers | sampling, "has no effect on zero-shot tasks: it is for reasoning tasks")
        _zero_shot(model, words, data, limit, batch_size, solver, dtype, output)
        return
    if not temperature:
        without_effect = sampling | {"temperature": None, "samples": None if samples == 1 else samples}
        _refuse_options(without_effect, "needs a --temperature above 0, such as 0.7")

    from crosscurrent.evaluation.answering import AnsweringSettings

    settings = AnsweringSettings(
        batch_size=batch_size,
        max_new_tokens=max_new_tokens,
        prompt_format=None if prompt_format is None else prompt_format.value,
        solver=solver,
        num_samples=samples or 1,
        temperature=temperature or 0.0,
        top_p=1.0 if top_p is None else top_p,
        seed=seed or 0,
    )
    _answers(model, words, data, limit, (split or SplitName.test).value, settings, dtype, output, baseline)


def _are_reasoning_tasks(words: list[str]) -> bool:
    from crosscurrent.experiments.answering import is_reasoning_task
    from crosscurrent.suggestions import did_you_mean
    from crosscurrent.tasks.reasoning import reasoning_task_names

    reasoning = [word for word in words if is_reasoning_task(word)]
    others = [word for word in words if not is_reasoning_task(word)]
    if reasoning and others:
        raise ValueError(
            f"{reasoning[0]} is a reasoning task and {others[0]} is none.{did_you_mean(others[0], reasoning_task_names())} "
            "Evaluate zero-shot tasks and reasoning tasks by commands of their own."
        )
    return bool(reasoning)


def _refuse_options(options: dict[str, Any], why: str) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise typer.BadParameter(f"{given[0]} {why}.")


def _answers(
    name: str,
    words: list[str],
    data: Path | None,
    limit: int | None,
    split: Any,
    settings: Any,
    dtype: Dtype,
    output: Path | None,
    baseline: Path | None,
) -> None:
    """Evaluate on reasoning tasks."""
    from crosscurrent.cli.answer_table import answer_table
    from crosscurrent.experiments.answering import (
        Evaluated,
        claimed,
        problems_of,
        read_baseline,
        run_answering,
        tasks_of,
        write_scores,
    )
    from crosscurrent.models.base import load_tokenizer

    tasks = tasks_of(words)  # whatever can be wrong is named before the model is loaded
    problems = problems_of(tasks, split, data, limit)
    baselines = None if baseline is None else read_baseline(baseline, tasks)
    evaluated = Evaluated(name, _load(name, dtype), load_tokenizer(name))
    with claimed(output, tasks):
        facts = run_answering(evaluated, tasks, problems, settings, output, baselines)
        facts |= {"split": split, "limit": limit}
        typer.echo(answer_table(facts))  # first, so that a full disk does not take it
        if output is not None:
            write_scores(facts, output)


def _load(name: str, dtype: Dtype) -> Any:
    import torch

    from crosscurrent.models.base import load_base

    model: Any = load_base(name, dtype=dtype.value)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _zero_shot(
    name: str,
    words: list[str],
    data: Path | None,
    limit: int | None,
    batch_size: int,
    solver: str,
    dtype: Dtype,
    output: Path | None,
) -> None:
    """Evaluate on multiple-choice tasks."""
    _prepare_harness()

    from crosscurrent.evaluation.harness import CrosscurrentLM
    from crosscurrent.evaluation.solver_choice import scoring_solver
    from crosscurrent.evaluation.zero_shot import load_tasks, task_names
    from crosscurrent.experiments.zero_shot import refuse_used_folder, run_zero_shot, write_evaluation
    from crosscurrent.models.base import load_tokenizer

    names = task_names(words)
    scoring_solver(solver)  # a mistake in it is named before the model is loaded
    if output is not None:
        refuse_used_folder(output)
    loaded = load_tasks(names, data)
    tokenizer = load_tokenizer(name)
    lm = CrosscurrentLM(_load(name, dtype), solver, tokenizer=tokenizer, batch_size=batch_size)
    evaluation = run_zero_shot(name, lm, loaded, data, limit)
    typer.echo(_table(evaluation.facts))  # first, so that a full disk does not take it
    if output is not None:
        write_evaluation(evaluation, output)


def _prepare_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("zero-shot tasks need lm-evaluation-harness: pip install 'crosscurrent[harness]'.")

    import datasets

    datasets.disable_progress_bars()  # HellaSwag is preprocessed several times; the scoring has a bar of its own
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it explains itself at length


def _table(facts: dict[str, Any]) -> str:
    solver = facts["solver"]["name"] if facts["solver"] else "none"
    lines = [
        f"{facts['model']}: {facts['model_class']}, {facts['num_parameters']:,} parameters, {facts['dtype']}, "
        f"solver {solver}",
        "",
        f"{'task':<15}{'examples':>10}{'acc':>9}{'+-':>8}{'acc_norm':>11}{'+-':>8}",
    ]
    for name, found in facts["tasks"].items():
        shown = [_percent(found.get(key)) for key in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")]
        lines.append(f"{name:<15}{found['num_examples']:>10,}{shown[0]:>9}{shown[1]:>8}{shown[2]:>11}{shown[3]:>8}")
    lines += ["", f"mean {facts['mean']:.2%}: of acc_norm where there is one, else of acc; +-: one standard error"]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
