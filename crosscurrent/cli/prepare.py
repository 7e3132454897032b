"""`crosscurrent prepare`"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class OnErrorChoice(StrEnum):
    """What to do at something that cannot be read as a text."""

    STOP = "stop"
    SKIP = "skip"


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files (.txt, .jsonl, .jsonl.gz, .parquet), folders of them, or the id of one data set on the "
            "Hugging Face hub.",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, a folder, an id on the Hugging Face hub, or new:SIZE: one made of these texts, with so many "
            "tokens."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the tokens. A folder that is not finished is gone on with.")],
    field: Annotated[str, typer.Option(help="The key or column that holds the text.")] = "text",
    hub_config: Annotated[
        str | None, typer.Option(help="Of a data set on the hub: which config.", show_default="its default")
    ] = None,
    hub_split: Annotated[
        str | None, typer.Option(help="Of a data set on the hub: which split.", show_default="train")
    ] = None,
    hub_revision: Annotated[
        str | None, typer.Option(help="Of a data set on the hub: branch, tag or commit.", show_default="the newest")
    ] = None,
    validation_share: Annotated[
        float, typer.Option(min=0.0, help="Share of documents held out, below 1, chosen by the hash of their text.")
    ] = 0.005,
    shard_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per file. What is stopped goes on after the last finished one.")
    ] = 100_000_000,
    num_workers: Annotated[
        int, typer.Option(min=1, help="Processes that tokenise. The result does not depend on it.")
    ] = 1,
    on_error: Annotated[
        OnErrorChoice,
        typer.Option(help="At broken lines, missing fields and what is no text: stop, or skip and count it."),
    ] = OnErrorChoice.STOP,
) -> None:
    """Tokenise texts once, for pretraining.

    Every document ends with the tokenizer's EOS. Documents, not tokens, are held out for validation; equal texts are always
    on the same side. Stop it whenever you like: the same command goes on, and gives the same bytes as if it had never been
    stopped. Empty documents are left out and counted.

    \b
    Example: crosscurrent prepare corpus.jsonl --tokenizer smollm2-135m --output corpus-tokens
             crosscurrent prepare texts/ more.parquet --tokenizer my-model --output tokens --num-workers 8
             crosscurrent prepare HuggingFaceFW/fineweb-edu --hub-config sample-10BT \\
                 --tokenizer HuggingFaceTB/SmolLM2-135M --output fineweb-edu-10b --num-workers 16
             crosscurrent prepare notes.txt --tokenizer new:4096 --output tokens-for-small-models
    """
    if validation_share >= 1:
        raise typer.BadParameter(f"--validation-share: {validation_share} is not below 1.")

    from crosscurrent.data.prepare import new_tokenizer
    from crosscurrent.data.prepare import prepare as prepare_texts
    from crosscurrent.data.shards import SPLITS
    from crosscurrent.data.sources import LeftOut, LocalFiles, open_source
    from crosscurrent.models.base import load_tokenizer, shareable_name

    source = open_source(sources, field, hub_config, hub_split, hub_revision)
    if isinstance(source, LocalFiles) and source.others:
        others = f"{len(source.others)} files of other kinds are left out, such as {source.others[0]}"
        typer.echo(f"warning: {others}.", err=True)
    kind, _, size = tokenizer.partition(":")
    is_new = kind == "new"
    if is_new and not (size.isdecimal() and 257 <= int(size) < 2**31):
        raise typer.BadParameter(f"--tokenizer {tokenizer}: new:SIZE takes a number from 257, as in new:4096.")
    inside = [one for one in sources if Path(one).is_dir() and output.resolve().is_relative_to(Path(one).resolve())]
    if inside:
        raise typer.BadParameter(f"--output {output} is inside of the source {inside[0]}: give another folder.")
    prepared = prepare_texts(
        source,
        new_tokenizer(source, int(size), validation_share, on_error.value) if is_new else load_tokenizer(tokenizer),
        output,
        tokenizer_name=tokenizer if is_new else shareable_name(tokenizer),
        validation_share=validation_share,
        shard_tokens=shard_tokens,
        num_workers=num_workers,
        on_error=on_error.value,
    )
    lines = [
        f"{split}: {prepared.num_documents(split):,} documents, {prepared.num_tokens(split):,} tokens, "
        f"{len(prepared.shards[split])} shards"
        for split in SPLITS
    ]
    left_out = LeftOut(prepared.manifest["left_out"]).lines()
    lines += [f"left out, {line}" for line in left_out] or ["left out: none"]
    typer.echo("\n".join([f"{output}: tokens of {prepared.manifest['tokenizer']['name']}", *lines]))
