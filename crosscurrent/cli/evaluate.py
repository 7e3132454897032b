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


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2-135m, a folder, or an id on the Hugging Face hub.")
    ],
    tasks: Annotated[
        str,
        typer.Option(
            metavar="TASK,...",
            help="Some of arc_easy, arc_challenge, hellaswag, piqa, winogrande, openbookqa, boolq; zero_shot: all.",
        ),
    ] = "zero_shot",
    data: Annotated[
        Path | None,
        typer.Option(help="A folder of local files (docs/evaluation.md) for the first five.", show_default="the hub"),
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
            "--output", "-o", show_default="none", help="A new folder for scores and records of each example."
        ),
    ] = None,
) -> None:
    """Score a model zero-shot on multiple-choice tasks.

    Each answer is scored by its log-likelihood after the question, with the prompts of lm-evaluation-harness and by its
    code. acc is the share of questions whose right answer is the likeliest; acc_norm divides by the answers' lengths. The
    mean takes acc_norm where a task has it. OUTPUT gets scores.json, and a line per example in TASK.jsonl.

    \b
    Example: crosscurrent evaluate retrofitted
             crosscurrent evaluate retrofitted --tasks arc_easy,piqa --limit 200 --output scores
             crosscurrent evaluate retrofitted --tasks hellaswag --data folder --solver exact
             crosscurrent evaluate retrofitted --tasks piqa --solver '{"name": "jacobi", "iterations": 8}'
    """
    _prepare_harness()

    import torch

    from crosscurrent.evaluation.harness import CrosscurrentLM, scoring_solver
    from crosscurrent.evaluation.zero_shot import load_tasks, task_names
    from crosscurrent.experiments.zero_shot import refuse_used_folder, run_zero_shot, write_evaluation
    from crosscurrent.models.base import load_base, load_tokenizer

    names = task_names([word.strip() for word in tasks.split(",") if word.strip()])
    scoring_solver(solver)  # a mistake in it is named before the model is loaded
    if output is not None:
        refuse_used_folder(output)
    loaded = load_tasks(names, data)
    tokenizer = load_tokenizer(model)
    language_model: Any = load_base(model, dtype=dtype.value)
    language_model.to("cuda" if torch.cuda.is_available() else "cpu")
    lm = CrosscurrentLM(language_model, solver, tokenizer=tokenizer, batch_size=batch_size)
    evaluation = run_zero_shot(model, lm, loaded, data, limit)
    typer.echo(_table(evaluation.facts))  # first, so that a full disk does not take it
    if output is not None:
        write_evaluation(evaluation, output)


def _prepare_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("evaluation needs lm-evaluation-harness: pip install 'crosscurrent[harness]'.")

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
