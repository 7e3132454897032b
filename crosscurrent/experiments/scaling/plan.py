"""Time of a step on so many GPUs, and the fastest way to lay a model out on them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from crosscurrent.experiments.scaling.machine import GPUS_PER_NODE, Assumptions, Gpu
from crosscurrent.experiments.scaling.shapes import Subject
from crosscurrent.recurrence import Sequential, Sweeps
from crosscurrent.training.flops import Passes, StepFlops, passes_of, step_flops

GRADIENT = 4  # bytes of an element: float32, as gradients are reduced
GATHERED = 2  # bfloat16, as weights are gathered
LAYERS_AT_ONCE = 2  # gathered: one that runs, one that is fetched


@dataclass(frozen=True)
class Layout:
    """How a step is spread out.

    Attributes:
        parallelism: "DDP", "FSDP2" (weights sharded over all GPUs) or "HSDP" (sharded within a node, copied to others).
        num_used: GPUs that have rows to work on.
        num_shards: over how many GPUs weights, gradients and optimizer states are sharded.
        microbatch: rows of one forward and backward pass on a GPU.
        num_microbatches: of a step.
        checkpointing: layers, or columns of `Sequential`, are computed once more in the backward pass.
    """

    parallelism: str
    num_used: int
    num_shards: int
    microbatch: int
    num_microbatches: int
    checkpointing: bool


@dataclass(frozen=True)
class Plan:
    """A step of a subject in a layout.

    Attributes:
        memory: bytes on each GPU.
        compute: seconds that the GPUs' products take.
        launching: seconds that the host takes to start all operations one after the other, or dependent steps to read
            the range's weights once each, if that is longer.
        communication: seconds of all collective operations.
        exposed: of these, what nothing hides.
        flops: of the step.
        limit: what takes most of the time: "compute", "dependent steps", "launching" or "interconnect"; with "batch" if
            there are more GPUs than rows.
    """

    layout: Layout
    memory: float
    compute: float
    launching: float
    communication: float
    exposed: float
    flops: StepFlops
    limit: str

    @property
    def seconds(self) -> float:
        return max(self.compute, self.launching) + self.exposed


@dataclass(frozen=True)
class Estimate:
    """What does not depend on the layout, and the sums that do."""

    subject: Subject
    gpu: Gpu
    num_gpus: int
    sequence_length: int
    batch_size: int
    assumptions: Assumptions

    @cached_property
    def flops(self) -> StepFlops:
        return step_flops(self.subject.model, self.batch_size, self.sequence_length, self.subject.kind.solver)

    @cached_property
    def passes(self) -> Passes:
        kind = self.subject.kind
        if kind.solver is None:
            return Passes(0, 0, 1, 0, steps=1, reads=0)
        return passes_of(kind.solver, self.sequence_length, kind.feedback_interval)

    def layouts(self) -> Iterator[Layout]:
        """All that are tried, the simplest first."""
        num_used = min(self.num_gpus, self.batch_size)
        rows = self.batch_size // num_used
        shards = {"DDP": 1}
        if num_used > 1:
            shards |= {"FSDP2": num_used}
        if num_used > GPUS_PER_NODE:
            shards |= {"HSDP": GPUS_PER_NODE}
        microbatches = [2**power for power in range(rows.bit_length()) if rows % 2**power == 0]
        for parallelism, num_shards in shards.items():
            for checkpointing in (False, True):
                if checkpointing and isinstance(self.subject.kind.solver, Sweeps):
                    continue  # refuses it
                for microbatch in microbatches:
                    yield Layout(parallelism, num_used, num_shards, microbatch, rows // microbatch, checkpointing)

    def memory(self, layout: Layout) -> float:
        """Bytes on each GPU."""
        whole = self.subject.step_memory(layout.microbatch, self.sequence_length, layout.checkpointing)
        if layout.num_shards == 1:
            buckets = whole.gradients if layout.num_used > 1 else 0  # DDP's copy of all gradients
            return whole.total + buckets
        layers = self.subject.model.config.num_hidden_layers
        state = whole.weights + whole.gradients + whole.optimizer
        head = 2 * GATHERED * self.head_size
        in_layers = GATHERED * (self.subject.num_parameters - self.head_size) / layers
        gathered = head + LAYERS_AT_ONCE * in_layers + GATHERED * self.kept_gathered
        # Of what runs, before they are scattered.
        gradients = GRADIENT / GATHERED * (head + in_layers) + GRADIENT * self.kept_gathered
        return state / layout.num_shards + gathered + gradients + whole.transient

    @property
    def head_size(self) -> int:
        text = self.subject.model.config.get_text_config()
        return text.vocab_size * text.hidden_size

    @property
    def is_stepped(self) -> bool:
        return isinstance(self.subject.kind.solver, Sequential | Sweeps)

    @property
    def kept_gathered(self) -> float:
        """Weights that stay gathered through a step: those of the recurrence (see training/sharding.py)."""
        is_recurrent = self.subject.kind.solver is not None
        return self.subject.range_share * self.subject.num_parameters if is_recurrent else 0.0

    def compute(self, layout: Layout) -> float:
        again = self.recomputed if layout.checkpointing else 1.0
        return self.flops.total * again / (layout.num_used * self.gpu.peak * self.assumptions.efficiency)

    @property
    def recomputed(self) -> float:
        """Of a forward, and two for its backward pass, the forward pass once more; of an RLT's decoder alone."""
        return 1 + (0.5 if self.is_stepped else 1) / 3

    def launching(self, layout: Layout) -> float:
        """Layers run one after the other; a backward pass starts about twice the operations of a forward pass."""
        in_range = len(self.subject.range_layers)
        others = self.subject.model.config.num_hidden_layers - in_range
        passes = self.passes
        extra = 1 if layout.checkpointing else 0
        a_layer = self.assumptions.operations_per_layer * self.assumptions.operation_latency / 3  # forward
        if isinstance(self.subject.kind.solver, Sequential):
            reading = GATHERED * self.subject.range_share * self.subject.num_parameters / self.gpu.bandwidth
            of_range = passes.steps * (3 + extra) * max(in_range * a_layer, reading)
            return (others * 3 * a_layer + of_range) * layout.num_microbatches
        backward = (2 + extra) * passes.differentiated + 2 * passes.adjoint
        runs = others * (3 + extra) + in_range * (passes.steps + backward)
        return runs * a_layer * layout.num_microbatches

    def communication(self, layout: Layout) -> float:
        """Ring collectives: (n - 1) / n of all bytes for a gather or a scatter, twice that for an all-reduce."""
        if layout.num_used == 1:
            return 0.0
        size = self.subject.num_parameters
        reduced = 2 * GRADIENT * size / layout.num_shards
        if layout.num_shards == 1:
            return reduced * _ring(layout.num_used) / self.link(layout.num_used)
        gathers = GATHERED * (2 * size - self.kept_gathered) * _ring(layout.num_shards)  # forward, and backward again
        scattered = GRADIENT * size * _ring(layout.num_shards)
        collectives = 3 * self.subject.model.config.num_hidden_layers
        hops = collectives * (layout.num_shards - 1) * self.assumptions.hop_latency
        seconds = ((gathers + scattered) / self.link(layout.num_shards) + hops) * layout.num_microbatches
        num_copies = layout.num_used // layout.num_shards
        across = self.gpu.between_nodes * self.assumptions.link_efficiency
        return seconds + (reduced * _ring(num_copies) / across if num_copies > 1 else 0.0)

    def link(self, group: int) -> float:
        """Bytes per second at which a ring over a group of GPUs moves: a node's cards work side by side."""
        speed = self.gpu.within_node
        if group > GPUS_PER_NODE:
            speed = min(speed, GPUS_PER_NODE * self.gpu.between_nodes)
        return speed * self.assumptions.link_efficiency

    def plan(self, layout: Layout) -> Plan:
        compute, launching = self.compute(layout), self.launching(layout)
        communication = self.communication(layout)
        busy = max(compute, launching)
        exposed = max(self.assumptions.exposed * communication, communication - busy * 2 / 3)
        dependent = "dependent steps" if self.is_stepped else "launching"
        shares = {"compute": compute, dependent: launching, "interconnect": exposed}
        limit = max(shares, key=lambda name: shares[name])
        if layout.num_used < self.num_gpus:
            limit += ", batch"
        return Plan(layout, self.memory(layout), compute, launching, communication, exposed, self.flops, limit)


def _ring(num: int) -> float:
    return (num - 1) / num


def best_plan(
    subject: Subject,
    gpu: Gpu,
    num_gpus: int,
    sequence_length: int = 2048,
    batch_size: int = 256,
    assumptions: Assumptions | None = None,
) -> Plan | None:
    """The fastest layout that fits into memory, of two within 2 % the simpler one. None: nothing fits.

    Raises:
        ValueError: a number is below 1, or not a power of two where it has to be.

    Example:
        >>> from crosscurrent.experiments.scaling import GPUS, KINDS, make_subject
        >>> plan = best_plan(make_subject("135m", KINDS[0]), GPUS["h100"], num_gpus=8)
        >>> plan.layout.parallelism, plan.limit
        ('DDP', 'compute')
    """
    for name, value in (("num_gpus", num_gpus), ("batch_size", batch_size), ("sequence_length", sequence_length)):
        if value < 1:
            raise ValueError(f"{name}={value} is not allowed: give at least 1.")
    for name, value in (("num_gpus", num_gpus), ("batch_size", batch_size)):
        if value & (value - 1):
            raise ValueError(f"{name}={value} is not allowed: give a power of two.")
    assumed = Assumptions() if assumptions is None else assumptions
    estimate = Estimate(subject, gpu, num_gpus, sequence_length, batch_size, assumed)
    best: Plan | None = None
    for layout in estimate.layouts():
        if estimate.memory(layout) > gpu.memory * assumed.usable_memory:
            continue
        plan = estimate.plan(layout)
        if best is None or plan.seconds < 0.98 * best.seconds:
            best = plan
    return best


def least_memory(subject: Subject, gpu: Gpu, num_gpus: int, sequence_length: int, batch_size: int) -> float:
    """Bytes that the thriftiest layout needs on each GPU."""
    estimate = Estimate(subject, gpu, num_gpus, sequence_length, batch_size, Assumptions())
    return min(map(estimate.memory, estimate.layouts()))
