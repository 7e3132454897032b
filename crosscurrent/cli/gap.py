"""`crosscurrent gap`"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

MOST_RESIDUALS = 16  # lines of the table


def gap(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A recurrent model: a folder, or an id on the Hugging Face hub.")
    ],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="Texts: a .txt file, or a .jsonl file with one object per line.")
    ],
    iterations: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", show_default="the model's solver", help="Jacobi iterations to measure, a row for each."
        ),
    ] = None,
    field: Annotated[str, typer.Option(help="Of a .jsonl file: the field that holds the text.")] = "text",
    max_length: Annotated[
        int, typer.Option(min=2, help="Tokens per document: .txt files are cut to it, .jsonl lines cut off.")
    ] = 256,
    max_documents: Annotated[int, typer.Option(min=1, help="Measure on the first so many documents.")] = 32,
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per pass.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure how far training is from decoding.

    In training a recurrent model solves whole texts approximately, by Jacobi iteration; when it generates it goes token by
    token, which is exact. This scores texts both ways: the two losses, how often both find the same token likeliest,
    how far apart the log-probabilities of the true tokens are, and the residual (the relative change of the states) of each
    iteration. All are zero, and the agreement 100 %, once there are as many iterations as tokens. If a gap is large, train
    with more iterations. Every token counts as recurrent.

    \b
    Example: crosscurrent gap retrofitted notes.txt
             crosscurrent gap retrofitted corpus.jsonl --iterations 1,2,4,8,16 --max-documents 8
             crosscurrent gap retrofitted corpus.jsonl --json | jq .rows[0].token_agreement
    """
    counts = _counts(iterations)

    from tqdm import tqdm

    from crosscurrent.data.collation import PaddingCollator
    from crosscurrent.data.texts import in_batches, read_documents
    from crosscurrent.evaluation.gap import train_decode_gaps
    from crosscurrent.evaluation.probing import refuse_too_long
    from crosscurrent.models.base import load_base, load_tokenizer
    from crosscurrent.models.wrapped import recurrent_model
    from crosscurrent.recurrence import Jacobi, Solver, solver_from_dict

    documents = read_documents(data, load_tokenizer(model), max_length, max_documents, field)
    language_model: Any = recurrent_model(load_base(model))
    longest = max(map(len, documents))
    refuse_too_long(language_model, longest)
    measured: list[Solver] = [Jacobi(count, backward_iterations=1) for count in counts]
    if not measured:
        measured = [solver_from_dict(language_model.config.solver)]
    collator = PaddingCollator(pad_token_id=0)
    parts = in_batches([{"input_ids": document} for document in documents], batch_size)
    batches = [collator(part) for part in parts]
    with tqdm(batches, desc="scoring", unit="batch", leave=False) as bar:
        gaps = train_decode_gaps(language_model, bar, measured)
    rows = [_row(solver, found) for solver, found in zip(measured, gaps, strict=True)]
    facts = {
        "model": model,
        "num_documents": len(documents),
        "num_tokens": gaps[0].num_tokens,
        "longest_document": longest,
        "exact_loss": gaps[0].exact_loss,
        "rows": rows,
    }
    typer.echo(json.dumps(facts, indent=2) if as_json else _table(facts))


def _counts(iterations: str | None) -> list[int]:
    words = [word.strip() for word in iterations.split(",")] if iterations is not None else []
    strange = [word for word in words if not word.isdecimal() or int(word) < 1]
    if strange:
        raise typer.BadParameter(f"--iterations: {strange[0]!r} is not a number of at least 1; give such as 1,2,4,8.")
    return [int(word) for word in words]


def _row(solver: Any, found: Any) -> dict[str, Any]:
    from crosscurrent.recurrence import solver_to_dict

    return {
        "solver": solver_to_dict(solver),
        "iterations": found.iterations,
        "loss": found.loss,
        "loss_difference": found.loss_difference,
        "token_agreement": found.token_agreement,
        "mean_difference": found.mean_difference,
        "max_difference": found.max_difference,
        "mean_residuals": found.mean_residuals,
        "max_residuals": found.max_residuals,
    }


def _table(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['model']}: {facts['num_documents']} documents of up to {facts['longest_document']} tokens, "
        f"{facts['num_tokens']:,} tokens predicted",
        f"loss token by token (exact, as in decoding): {facts['exact_loss']:.6f}",
        "",
        f"{'solver':<11}{'iterations':>11}{'loss':>11}{'difference':>13}{'agreement':>11}"
        f"{'log-prob. mean':>17}{'max':>11}{'last residual':>16}",
    ]
    for row in facts["rows"]:
        residual = f"{row['max_residuals'][-1]:.2e}" if row["max_residuals"] else "none"
        lines.append(
            f"{row['solver']['name']:<11}{row['iterations']:>11}{row['loss']:>11.6f}{row['loss_difference']:>+13.2e}"
            f"{row['token_agreement']:>11.2%}{row['mean_difference']:>17.2e}{row['max_difference']:>11.2e}{residual:>16}"
        )
    longest = max(facts["rows"], key=lambda row: row["iterations"])
    if longest["mean_residuals"]:
        lines += ["", f"{'iteration':>11}{'residual, mean':>17}{'max':>11}   (over batches)"]
        pairs = list(zip(longest["mean_residuals"], longest["max_residuals"], strict=True))
        shown = enumerate(pairs[:MOST_RESIDUALS], start=1)
        lines += [f"{place:>11}{mean:>17.2e}{largest:>11.2e}" for place, (mean, largest) in shown]
        if len(pairs) > MOST_RESIDUALS:
            lines.append(f"  and {len(pairs) - MOST_RESIDUALS} more: --json has all")
    return "\n".join(lines)
