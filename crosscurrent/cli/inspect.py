"""`crosscurrent inspect`"""

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A retrofitted model: a folder, or an id on the Hugging Face hub.")
    ],
    text: Annotated[str | None, typer.Option(help="The text to look at.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file that holds the text, instead.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Look at the first so many tokens.")] = 128,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, show_default="the number of tokens", help="Jacobi iterations of the residual curve."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("inspect.html"),
) -> None:
    """Show what a model's recurrence does with a text.

    Writes one page that needs nothing but itself: both gates at each token, the norms of state and stream, how fast
    Jacobi iterations converge, how long a perturbation of the state lasts, and what the state says when it is read as the
    last layer's output. The figures are beside it, as PNG and SVG, in OUTPUT's name + _figures. Every token counts as
    recurrent.

    \b
    Example: crosscurrent inspect retrofitted --text "Once upon a time, there was a fox."
             crosscurrent inspect retrofitted --file story.txt --max-tokens 64 --output story.html
    """
    if (text is None) == (file is None):
        raise typer.BadParameter("give the text either with --text or with --file.")
    if output.suffix not in (".html", ".htm"):
        raise typer.BadParameter(f"--output {output}: the page needs a name that ends in .html.")

    from crosscurrent.data.texts import refuse_half_characters
    from crosscurrent.evaluation.telemetry import t2mlr_model
    from crosscurrent.experiments.inspect import inspect_text, write_page
    from crosscurrent.models.base import load_base, load_tokenizer, shareable_name

    shown = text if text is not None else _read(file)
    refuse_half_characters(shown, "the text")
    tokenizer = load_tokenizer(model)
    language_model = t2mlr_model(load_base(model))
    typer.echo("Measuring: the text is run token by token.", err=True)
    written = write_page(
        inspect_text(language_model, tokenizer, shown, max_tokens, iterations),
        language_model,
        shareable_name(model),
        output,
    )
    typer.echo(f"Written: {written[0]}, and {len(written) - 1} figures in {written[1].parent}")


def _read(file: Path | None) -> str:
    from crosscurrent.data.texts import refuse_other_encodings

    assert file is not None
    with refuse_other_encodings(file):
        return file.read_text(encoding="utf-8-sig")
