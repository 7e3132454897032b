"""What the cost model of `crosscurrent scaling` says beside what `crosscurrent bench` has measured on a CPU.

    crosscurrent bench t2mlr-step rlt-step --output bench.json
    python benchmarks/scaling.py bench.json

Time: the ratio of operations, of a model to the same without recurrence, beside the ratio of times. Memory: the calculated
peak of a training step without optimizer beside that of the process. Without a file: results/bench/bench.json.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from crosscurrent.experiments.bench.rlt import make_llama, make_rlt
from crosscurrent.experiments.bench.t2mlr import BASE, SOLVERS, make_base, make_t2mlr
from crosscurrent.experiments.scaling import FLOAT32, step_memory
from crosscurrent.training.flops import step_flops

MEASURED = Path(__file__).parent.parent / "results" / "bench" / "bench.json"


def models(case: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name as in the results, model without storage, solver. The first is what others are compared with."""
    shape = case["sizes"]["model"]
    with torch.device("meta"):
        if case["name"] == "rlt-step":
            for name, interval in (("RLT-0", None), ("RLT-1", 1), ("RLT-2 (4)", 4)):
                yield name, make_rlt(shape, "meta", interval), None
            yield "Llama", make_llama(shape, "meta"), None
            return
        yield BASE, make_base(shape, "meta"), None
        recurrent = make_t2mlr(shape, "meta")
    for name, solver in SOLVERS.items():
        yield name, recurrent, solver


def rows(case: dict[str, Any]) -> Iterator[str]:
    measured = {subject["name"]: subject for subject in case["subjects"]}
    batch = case["sizes"]["batch_size"], case["sizes"]["num_tokens"]
    first, *_ = subjects = list(models(case))
    unit = step_flops(first[1], *batch).total
    for name, model, solver in subjects:
        subject = measured[name]
        seconds = subject["median"] / measured[first[0]]["median"]
        calculated = step_memory(model, *batch, FLOAT32, solver).first_backward
        peak = subject["peak_memory"]
        memory = ["-", "-"] if peak is None else [f"{peak / 2**20:,.0f} MiB", f"{calculated / peak:.2f}"]
        cells = [name, f"{step_flops(model, *batch, solver).total / unit:.2f}", f"{seconds:.2f}", *memory]
        yield "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="?", type=Path, default=MEASURED, help="what bench --output has written")
    cases = {case["name"]: case for case in json.loads(parser.parse_args(arguments).measured.read_text())["cases"]}
    print("| model | operations | time | measured peak | calculated / measured |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in ("t2mlr-step", "rlt-step"):
        print("\n".join(rows(cases[name])) if name in cases else f"{name} was not measured")


if __name__ == "__main__":
    main()
