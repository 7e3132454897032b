"""Results as text: aligned columns, or Markdown."""

from typing import Any

MEBIBYTE = 2**20


def case_tables(result: dict[str, Any], environment: dict[str, Any], markdown: bool) -> str:
    """Everything measured of one case.

    Args:
        result: as `run_case` returns it.
        environment: as `facts.environment` returns it.
        markdown: pipe tables instead of aligned columns.
    """
    sizes = ", ".join(f"{name} {_plain(value)}" for name, value in result["sizes"].items())
    lines = [
        f"{'## ' if markdown else ''}{result['name']}: {result['summary']}",
        *([""] if markdown else []),
        f"{sizes}; {environment['dtype']}, {environment['device']}, {environment['threads']} threads, "
        f"{result['rounds']} rounds",
        "",
        aligned_table(
            ["subject", f"ms a {result['unit']}", "quartiles", "memory", "parameters"], _subjects(result), markdown
        ),
        "",
        aligned_table(["ratio", "of", "median", "quartiles", "reach", "reached?"], _ratios(result), markdown),
    ]
    return "\n".join(lines)


def target_table(results: list[dict[str, Any]], markdown: bool) -> str:
    """All ratios that should reach something; empty if there are none.

    Example:
        >>> ratio = {"over": "a", "under": "b", "quantity": "seconds", "median": 1.26}
        >>> ratio |= {"reach": "<= 1.30", "is_reached": True}
        >>> print(target_table([{"name": "case", "ratios": [ratio]}], markdown=False))
        what         ratio    reach  reached?
        case: a / b   1.26  <= 1.30       yes
    """
    rows = [
        [
            f"{result['name']}: {ratio['over']} / {ratio['under']}{', memory' if ratio['quantity'] == 'memory' else ''}",
            _number(ratio["median"]),
            ratio["reach"],
            _verdict(ratio),
        ]
        for result in results
        for ratio in result["ratios"]
        if ratio["reach"]
    ]
    return aligned_table(["what", "ratio", "reach", "reached?"], rows, markdown) if rows else ""


def _subjects(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for subject in result["subjects"]:
        if subject["unavailable"]:
            rows.append([subject["name"], subject["unavailable"], "", "", ""])
            continue
        rows.append(
            [
                subject["name"],
                _milliseconds(subject["median"]),
                f"{_milliseconds(subject['lower_quartile'])} to {_milliseconds(subject['upper_quartile'])}",
                "" if subject["peak_memory"] is None else f"{subject['peak_memory'] / MEBIBYTE:,.0f} MiB",
                f"{subject['num_parameters']:,}",
            ]
        )
    return rows


def _ratios(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{ratio['over']} / {ratio['under']}",
            "memory" if ratio["quantity"] == "memory" else "time",
            _number(ratio["median"]),
            ""
            if ratio["quantity"] == "memory" or ratio["median"] is None
            else f"{_number(ratio['lower_quartile'])} to {_number(ratio['upper_quartile'])}",
            ratio["reach"] or "",
            _verdict(ratio),
        ]
        for ratio in result["ratios"]
    ]


def _verdict(ratio: dict[str, Any]) -> str:
    if not ratio["reach"]:
        return ""
    unjudged = "not measured" if ratio["median"] is None else "not judged"
    return {True: "yes", False: "no", None: unjudged}[ratio["is_reached"]]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _plain(value: Any) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def aligned_table(header: list[str], rows: list[list[str]], markdown: bool) -> str:
    """The first column to the left, the others to the right."""
    if markdown:
        rule = ["---"] + ["---:"] * (len(header) - 1)
        return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
    # A cell whose row is empty after it is a message: it may run over its column.
    full = [row for row in (header, *rows) if any(row[2:])]
    widths = [max(len(row[place]) for row in full) for place in range(len(header))]
    widths[0] = max(len(row[0]) for row in (header, *rows))
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
