"""The page of an inspected text, which needs nothing but itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from crosscurrent.experiments.drawing import inline_svg, page_template, save_figure
from crosscurrent.experiments.inspect.figures import draw_gates, draw_memory, draw_norms, draw_residuals
from crosscurrent.experiments.inspect.measure import HORIZON, Inspection, Reading
from crosscurrent.files import write_whole
from crosscurrent.models.t2mlr import T2MLRForCausalLM
from crosscurrent.version import __version__


@dataclass(frozen=True)
class Cell:
    """A gate at a token: its value as text, and its place from 0 (the lowest of the text) to 1 (the highest)."""

    text: str
    place: float


@dataclass(frozen=True)
class TokenRow:
    """What the page shows of a token."""

    number: int
    text: str
    current: Cell
    recurrent: Cell
    readings: tuple[Reading, ...]
    prediction: Reading
    following: str | None


def write_page(inspection: Inspection, model: T2MLRForCausalLM, name: str, output: Path) -> list[Path]:
    """Write the page, and its figures (PNG and SVG) into the folder NAME_figures beside it.

    Args:
        inspection: of the text.
        model: that was inspected.
        name: of the model, for the page.
        output: the page's file.

    Returns:
        The files written, the page first.

    Raises:
        ValueError: the output is a folder.
    """
    if output.is_dir():
        raise ValueError(f"{output} is a folder: give the name of a file, such as {output / 'inspect.html'}.")
    folder = output.parent / f"{output.stem}_figures"
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Figure] = {
        "gates": draw_gates(inspection.trace),
        "norms": draw_norms(inspection.trace),
        "residuals": draw_residuals(inspection.residuals),
        "memory": draw_memory(inspection.memory),
    }
    figures = {kind: inline_svg(save_figure(figure, folder / kind), kind) for kind, figure in drawn.items()}
    page = page_template("crosscurrent.experiments.inspect").render(
        name=name,
        facts=_facts(inspection, model),
        rows=_rows(inspection),
        ranges={
            "current": _range(inspection.trace.current_gate),
            "recurrent": _range(inspection.trace.recurrent_gate),
        },
        openings=inspection.openings,
        is_closed=not any(inspection.openings),
        figures=figures,
        captions=_captions(inspection),
        was_cut=inspection.was_cut,
        version=__version__,
    )
    write_whole(output, page)
    return [output, *(folder / f"{kind}.{form}" for kind in drawn for form in ("png", "svg"))]


def _facts(inspection: Inspection, model: T2MLRForCausalLM) -> dict[str, str]:
    config, trace = model.config, inspection.trace
    later = trace.fused & (trace.state_norm > 0)
    state, stream = _mean(trace.state_norm, later), _mean(trace.stream_norm, later)
    return {
        "recurrent layers": f"{config.layer_start} to {config.layer_end - 1} of {config.num_hidden_layers}",
        "tokens": str(len(inspection.tokens)),
        "gate on the stream": f"{inspection.openings[0]:+.3f} × {_mean(trace.current_gate, trace.fused):.3f}",
        "gate on the state": f"{inspection.openings[1]:+.3f} × {_mean(trace.recurrent_gate, trace.fused):.3f}",
        "mean norm of state / stream": f"{state:.3g} / {stream:.3g}",
        "change of the stream": f"{_mean(trace.change, trace.fused):.1%}",
        "effective memory": _tokens(inspection.memory.tokens),
        "... with undisturbed attention": _tokens(inspection.memory.tokens_clean),
    }


def _tokens(count: int | None) -> str:
    if count is None:
        return "longer than watched"
    return "1 token" if count == 1 else f"{count} tokens"


def _mean(values: Tensor, chosen: Tensor) -> float:
    return values[chosen].mean().item()


def _range(values: Tensor) -> str:
    return f"{values.min().item():.3f} to {values.max().item():.3f}"


def _captions(inspection: Inspection) -> dict[str, str]:
    after, watched = inspection.memory_position, len(inspection.memory.remaining) - 1
    last = f" The last one is {inspection.residuals[-1]:.2g}." if inspection.residuals else ""
    added = "" if any(inspection.openings) else " That is nothing here, and has no place on this scale."
    return {
        "gates": "How far the gates open at each token, before the factors tanh(g) that both share.",
        "norms": "The stream that enters the recurrent layers, the state that it meets, and what the fusion adds. The first "
        f"token reads no state.{added}",
        "residuals": "Training guesses all states and corrects them in parallel; this is how much each correction still "
        f"changes. Where it stays at about 1e-7, what is left is rounding.{last}",
        "memory": f"The state after {after} tokens, moved by 5 % in random directions, and the {watched} tokens after that "
        f"(at most {HORIZON}). Effective memory: when 10 % is left. With undisturbed attention: the tokens after it see the "
        "keys and values of a run that was not moved, so that the state alone remembers.",
    }


def _rows(inspection: Inspection) -> list[TokenRow]:
    current, recurrent = _cells(inspection.trace.current_gate[0]), _cells(inspection.trace.recurrent_gate[0])
    following: list[Any] = [*inspection.tokens[1:], None]
    return [
        TokenRow(place + 1, text, current[place], recurrent[place], readings, prediction, following[place])
        for place, (text, readings, prediction) in enumerate(
            zip(inspection.tokens, inspection.readings, inspection.predictions, strict=True)
        )
    ]


def _cells(gate: Tensor) -> list[Cell]:
    low, high = gate.min().item(), gate.max().item()
    width = high - low if high > low else 1.0
    return [Cell(f"{value:.3f}", (value - low) / width) for value in gate.tolist()]
