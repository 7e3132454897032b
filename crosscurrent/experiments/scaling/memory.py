"""Memory of a training step, from what autograd keeps of each layer.

Counted by hand in the layers' code, in bytes per token: every tensor that a node of the graph saves, once. D hidden_size, I
intermediate_size, V vocab_size, T tokens of a row.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from crosscurrent.models.rlt import RLTForCausalLM
from crosscurrent.models.t2mlr import T2MLRForCausalLM
from crosscurrent.recurrence import Implicit, Sequential, Solver, as_solver
from crosscurrent.training.flops import passes_of

FULL = 4  # bytes of a float32
ROWS_OF_FACTORS = 4096  # whose part of a weight's gradient steps leave to one product (recurrence/steps.py)


@dataclass(frozen=True)
class Precision:
    """How a step computes; weights and gradients are float32.

    Attributes:
        name: as in benchmarks.
        product: bytes per element of what products read and give.
        casts: whether products read copies in that width: each of them its own copy of its input, and one of its weight.
    """

    name: str
    product: int
    casts: bool

    def inputs(self, width: int, num_products: int) -> int:
        """Bytes that so many products of one input keep of it."""
        return self.product * width * (num_products if self.casts else 1)


FLOAT32 = Precision("float32", FULL, casts=False)
AUTOCAST = Precision("bfloat16-autocast", 2, casts=True)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one microbatch's forward and backward pass, and what lies there anyway.

    Attributes:
        weights, gradients: in float32.
        optimizer: AdamW's two moments.
        copies: of the weights, for products, from the forward to the backward pass.
        activations: what the forward pass leaves for the backward pass.
        logits: what the loss and its gradient need at once, beside the activations: log-probabilities in float32, their
            gradient, and the logits' gradient.
        working: what going back through one layer needs.
        head: the gradient of the output matrix, the first that is made.
        at_end: the embedding's, and the sum of both, if the output matrix is the embedding.
    """

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    logits: int
    working: int
    head: int
    at_end: int

    @property
    def total(self) -> int:
        """The peak of a step in training, where gradients of earlier microbatches and the optimizer's states are there."""
        kept = self.weights + self.gradients + self.optimizer + self.copies
        return kept + self.transient

    @property
    def transient(self) -> int:
        """What comes and goes within a step, at most."""
        going_back = self.activations + max(self.logits, self.head + self.working)
        return max(going_back, self.head + self.at_end)

    @property
    def first_backward(self) -> int:
        """The peak of a first step without optimizer: gradients appear while activations go, both layer by layer."""
        kept = self.weights + self.copies
        at_loss = self.activations + self.logits
        behind_head = self.activations + self.head + max(self.logits // 3, self.working)
        at_end = self.gradients + max(self.working, self.at_end)
        return kept + max(at_loss, behind_head, at_end)


def step_memory(
    model: Any,
    num_rows: int,
    sequence_length: int,
    precision: Precision,
    solver: Solver | None = None,
    checkpointing: bool = False,
) -> StepMemory:
    """What a step of a model needs on one device, nothing sharded.

    Args:
        model: a Llama, a T2MLR over one, or an RLT; on any device ("meta" too).
        num_rows: B, of a microbatch.
        sequence_length: T.
        precision: `FLOAT32` or `AUTOCAST`.
        solver: None: the model's.
        checkpointing: keep only the input of each layer, of each pass. Of a `Sequential` solver: `recompute_every` about
            sqrt(T) columns instead.

    Raises:
        ValueError: the model is of another kind.
    """
    num_tokens = num_rows * sequence_length
    text = model.config.get_text_config()
    if isinstance(model, RLTForCausalLM):
        per_token, working = _rlt(model, sequence_length, precision, solver, checkpointing)
    elif text.model_type == "llama":
        per_token, working = _llama(model, sequence_length, precision, solver, checkpointing)
    else:
        raise ValueError(
            f"the memory of a {type(model).__name__} is not known: give a Llama, a T2MLR of one, or an RLT."
        )
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    head = FULL * text.vocab_size * text.hidden_size
    final_norm = 2 * FULL * text.hidden_size + precision.inputs(text.hidden_size, 1)
    return StepMemory(
        weights=FULL * num_weights,
        gradients=FULL * num_weights,
        optimizer=2 * FULL * num_weights,
        copies=_copies(model, precision, solver),
        activations=(per_token + final_norm) * num_tokens
        + _factors(model, num_tokens, precision, solver, checkpointing),
        logits=3 * FULL * text.vocab_size * num_tokens,
        working=working * num_tokens,
        head=head,
        at_end=2 * head if text.tie_word_embeddings else 0,
    )


def _copies(model: Any, precision: Precision, solver: Solver | None) -> int:
    """Bytes of the weights' copies: all of them where products cast; those that steps join, once for each direction."""
    matrices = {id(part.weight): part.weight for part in model.modules() if isinstance(part, nn.Linear)}
    copies = precision.product * sum(weight.numel() for weight in matrices.values()) if precision.casts else 0
    if not _is_stepped(model, solver):
        return copies
    config = model.config
    if precision.casts:
        of_range = sum(weight.numel() for weight in model.model.decoder.parameters())
        return copies + precision.product * of_range
    joined = 3 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    return 2 * FULL * joined * config.num_decoder_layers


def _factors(model: Any, num_tokens: int, precision: Precision, solver: Solver | None, checkpointing: bool) -> int:
    """Bytes of inputs and output gradients that wait for the product which makes a weight's gradient of them. Where the
    inputs are there anyway they are not counted again."""
    if not _is_stepped(model, solver) or not (checkpointing or _recompute_every(model, solver)):
        return 0
    config = model.config
    a_layer = 12 * config.hidden_size + 3 * config.intermediate_size
    return precision.product * a_layer * config.num_decoder_layers * min(num_tokens, ROWS_OF_FACTORS)


def _is_stepped(model: Any, solver: Solver | None) -> bool:
    """Whether an RLT's decoder runs token by token."""
    chosen = as_solver(model.config.solver if solver is None else solver) if isinstance(model, RLTForCausalLM) else None
    return isinstance(chosen, Sequential) and model.config.feedback_interval is not None


def _recompute_every(model: Any, solver: Solver | None) -> int | None:
    return getattr(as_solver(model.config.solver if solver is None else solver), "recompute_every", None)


def _llama(
    model: Any, num_tokens: int, precision: Precision, solver: Solver | None, checkpointing: bool
) -> tuple[int, int]:
    """Bytes per token: kept in all, and needed while going back through a layer."""
    text = model.config.get_text_config()
    layer = layer_bytes(text, precision)
    kept = FULL * text.hidden_size if checkpointing else layer
    recomputed = layer if checkpointing else 0
    working = recomputed + 3 * precision.product * text.intermediate_size
    num_layers, fusion = text.num_hidden_layers, 0
    if isinstance(model, T2MLRForCausalLM):
        num_kept, fusion = _kept_passes(model, num_tokens, solver)
        num_layers += (num_kept - 1) * (model.config.layer_end - model.config.layer_start)
    return kept * num_layers + fusion, working


def layer_bytes(text: Any, precision: Precision) -> int:
    """What a Llama's layer keeps of a token."""
    width, inner = text.hidden_size, text.intermediate_size
    head_dim = getattr(text, "head_dim", None) or width // text.num_attention_heads
    queries, keys = text.num_attention_heads * head_dim, text.num_key_value_heads * head_dim
    streams_and_norms = FULL * 4 * width  # the stream before each half, and it divided by its size
    normed = precision.inputs(width, 3) + precision.inputs(width, 2)  # for q, k, v; for gate and up
    attention = precision.product * (2 * queries + 2 * keys)  # queries, keys, values, output
    feed_forward = precision.product * 4 * inner  # gate, its SiLU, up, their product
    return streams_and_norms + normed + attention + feed_forward


def _kept_passes(model: Any, num_tokens: int, solver: Solver | None) -> tuple[int, int]:
    """How many passes of the range are kept for the backward pass, and bytes per token that fusion and carry keep."""
    config = model.config
    chosen = as_solver(config.solver if solver is None else solver)
    num_kept = passes_of(chosen, num_tokens, config.feedback_interval).differentiated
    width = config.get_text_config().hidden_size
    if isinstance(model, RLTForCausalLM):
        # What was read, its norm (2), the gate, alpha times it, the projection; of a step fewer are read than of a pass.
        return num_kept, FULL * 6 * width * num_kept
    # What was read (2: as state, as input), the projection, two gates, these by their scalars, the sum to be normed (2) and
    # the state; an implicit gradient holds the states once more.
    implicit = isinstance(getattr(chosen, "rule", getattr(chosen, "gradient", None)), Implicit)
    return num_kept, FULL * width * (10 * num_kept + implicit)


def _rlt(
    model: Any, num_tokens: int, precision: Precision, solver: Solver | None, checkpointing: bool
) -> tuple[int, int]:
    config = model.config
    width, inner, product = config.hidden_size, config.intermediate_size, precision.product
    feed_forward = product * 4 * inner
    heads = FULL * 4 * width + product * width  # queries and keys: before and after their norm's division, and turned
    attention = heads + 2 * product * width  # values and output
    encoder = FULL * 4 * width + precision.inputs(width, 3) + precision.inputs(width, 2) + attention + feed_forward
    encoder += product * 2 * width
    memory = FULL * 3 * width + precision.inputs(width, 2) + product * 2 * width
    recall = FULL * 4 * width + precision.inputs(width, 1) + product * 3 * width
    decoder = encoder + recall
    num_kept, merge = _kept_passes(model, num_tokens, solver)
    is_stepped, every = _is_stepped(model, solver), _recompute_every(model, solver)
    if not is_stepped:
        decoder += FULL * num_tokens  # the window as a mask of floats, in each layer
    elif not precision.casts:
        decoder = _layer_step_bytes(config, num_tokens)
    if is_stepped and checkpointing and every is None:
        every = round(num_tokens**0.5)
    share = 1.0 if every is None else min(1.0, every / num_tokens)  # of the columns, at a time
    kept = config.num_encoder_layers * encoder + config.num_memory_groups * memory
    kept += int(share * (num_kept * config.num_decoder_layers * decoder + merge))
    return kept, 3 * product * inner


def _layer_step_bytes(config: Any, num_tokens: int) -> int:
    """What a decoder layer keeps of a token in float32 steps (`layer_step.py`), and its entries with their gradients."""
    recalled = min(config.memory_sliding_window or num_tokens, num_tokens // 2)
    seen = config.num_attention_heads * (min(config.sliding_window, num_tokens) + recalled)
    return FULL * (14 * config.hidden_size + 4 * config.intermediate_size + seen + 4 * config.hidden_size)
