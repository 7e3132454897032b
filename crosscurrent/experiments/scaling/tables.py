"""The plan as a table."""

from collections.abc import Sequence

from crosscurrent.experiments.bench.tables import aligned_table
from crosscurrent.experiments.scaling.machine import Assumptions, Gpu
from crosscurrent.experiments.scaling.plan import Plan, best_plan, least_memory
from crosscurrent.experiments.scaling.shapes import KINDS, make_subject

HEADER = ["model", "GPUs", "layout", "rows", "memory", "s a step", "tokens/s", "MFU", "limit"]


def plan_table(
    shape: str,
    gpu: Gpu,
    gpu_counts: Sequence[int],
    sequence_length: int,
    batch_size: int,
    assumptions: Assumptions,
    markdown: bool,
) -> str:
    """Every kind of model at one shape, on each number of GPUs.

    Columns: rows of a microbatch on a GPU x microbatches of a step, "again" if layers are computed once more backward;
    memory of a GPU in GB; MFU: model FLOPs utilisation, the recurrence's own not counted.
    """
    rows = []
    for kind in KINDS:
        subject = make_subject(shape, kind)
        for num_gpus in gpu_counts:
            plan = best_plan(subject, gpu, num_gpus, sequence_length, batch_size, assumptions)
            name = [f"{kind.name}, {subject.num_parameters / 1e6:,.0f}M", str(num_gpus)]
            if plan is None:
                need = least_memory(subject, gpu, num_gpus, sequence_length, batch_size)
                rows.append([*name, "-", "-", f"{need / 1e9:.0f}", "-", "-", "-", "memory"])
            else:
                rows.append(name + _cells(plan, gpu, num_gpus, sequence_length * batch_size))
    return aligned_table(HEADER, rows, markdown)


def _cells(plan: Plan, gpu: Gpu, num_gpus: int, num_tokens: int) -> list[str]:
    layout = plan.layout
    again = ", again" if layout.checkpointing else ""
    utilisation = plan.flops.model / (plan.seconds * gpu.peak * num_gpus)
    return [
        "one GPU" if num_gpus == 1 else layout.parallelism,
        f"{layout.microbatch} x {layout.num_microbatches}{again}",
        f"{plan.memory / 1e9:.0f}",
        f"{plan.seconds:.3g}",
        f"{num_tokens / plan.seconds:,.0f}",
        f"{utilisation:.1%}",
        plan.limit,
    ]
