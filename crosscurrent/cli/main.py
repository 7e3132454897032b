"""The command `crosscurrent`."""

from typing import Annotated

import typer
from huggingface_hub.utils import logging as hub_logging
from transformers import logging as transformers_logging

from crosscurrent.cli.ablate import ablate
from crosscurrent.cli.bench import bench
from crosscurrent.cli.consolidate import consolidate
from crosscurrent.cli.demo import demo
from crosscurrent.cli.errors import ReportingGroup
from crosscurrent.cli.evaluate import evaluate
from crosscurrent.cli.finetune import finetune
from crosscurrent.cli.gap import gap
from crosscurrent.cli.generate import generate
from crosscurrent.cli.info import info
from crosscurrent.cli.inspect import inspect
from crosscurrent.cli.prepare import prepare
from crosscurrent.cli.report import report
from crosscurrent.cli.retrofit import retrofit
from crosscurrent.cli.scaling import scaling
from crosscurrent.cli.stability import stability
from crosscurrent.cli.train import recipes, reproduce, train
from crosscurrent.version import __version__

app = typer.Typer(
    cls=ReportingGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
for command in (
    demo,
    retrofit,
    generate,
    info,
    inspect,
    gap,
    evaluate,
    ablate,
    prepare,
    recipes,
    train,
    finetune,
    reproduce,
    consolidate,
    report,
    stability,
    bench,
    scaling,
):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Temporal recurrence for decoder-only Transformers.

    What the later layers of a model computed for one token is fed back to earlier ones for the next token.

    \b
    crosscurrent demo                                    see it at work
    crosscurrent retrofit smollm2-135m retrofitted --layer-start 12 --layer-end 18
    crosscurrent info retrofitted
    crosscurrent generate retrofitted "What is the capital of France?"
    crosscurrent inspect retrofitted --text "Once upon a time, there was a fox."
    crosscurrent gap retrofitted notes.txt               how far training is from decoding
    crosscurrent evaluate retrofitted                    score it zero-shot, or on reasoning tasks
    crosscurrent ablate retrofitted --task gsm8k --output ablation   where recurrence helps
    crosscurrent prepare corpus.jsonl --tokenizer smollm2-135m --output tokens
    crosscurrent train rlt/mini/parity/rlt-1             train a model on a task
    crosscurrent finetune reasoning/mini/variable_assignment-2/retrofit    beside its baselines
    crosscurrent reproduce rlt --scale mini              run a whole study
    crosscurrent bench --all                             measure what recurrence costs
    crosscurrent scaling --model 135m                    estimate what training costs on GPUs

    Results go to stdout, progress to stderr. Exit codes: 0 done, 1 an error that one line on stderr explains, 2 wrong
    usage. `crosscurrent COMMAND --help` explains a command.
    """
    hub_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
