"""How the command line answers mistakes: one line on stderr, and an exit code that scripts can use."""

from typing import Any

import typer
from typer.core import TyperGroup

from crosscurrent.training.terminated import TerminatedError

INTERRUPTED = 130  # as shells say it: 128, and the number of the signal
USER_ERROR = 1  # 2 is typer's own, for wrong usage


def _text(error: Exception) -> str:
    """An error of the operating system begins with the file, not with its number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


class ReportingGroup(TyperGroup):
    """Commands whose ValueErrors (CheckpointError among them), OSErrors and missing packages are reported, not traced."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of our output has seen enough: typer ends quietly
        except ModuleNotFoundError as error:
            message = f"the package {error.name} is missing: pip install 'crosscurrent[train,plot]'"
        except KeyboardInterrupt:
            typer.echo(
                "stopped. Training, preparing, and evaluation with an output folder go on with the same command from what "
                "is finished.",
                err=True,
            )
            raise typer.Exit(INTERRUPTED) from None
        except TerminatedError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(128 + error.signal_number) from None
        except (ValueError, OSError) as error:
            message = " ".join(_text(error).split()) or type(error).__name__
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(USER_ERROR)
