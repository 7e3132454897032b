"""Which position a token reads: the map sigma(t), for one call.

Shapes: B rows, T tokens of this call.

A row is the sequence of its real tokens: padding, wherever it stands, is passed over as if it were deleted. A row may
hold several documents after one another (packing); nothing crosses from one to the next.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crosscurrent.recurrence.state import RecurrentState

INITIAL = -2  # the token has no predecessor in its document: it reads the architecture's initial state
CARRIED = -1  # the token reads the state that this call was given
PADDING = -1  # label of a column that holds no real token


@dataclass(frozen=True)
class Tokens:
    """What is known of each token of a call before anything is computed.

    Attributes:
        labels: [B, T] int64, the document that a token belongs to; PADDING where there is no real token.
        recurrent: [B, T] bool, whether the token is fused with a state.
    """

    labels: Tensor
    recurrent: Tensor

    @property
    def is_real(self) -> Tensor:
        return self.labels != PADDING


@dataclass(frozen=True)
class Stage:
    """A half-open range of columns, and what of it is known without asking the device.

    Attributes:
        any_fused: whether any of its tokens may be fused.
        any_initial: whether any of them may read the initial state.
    """

    start: int
    stop: int
    any_fused: bool
    any_initial: bool

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Plan:
    """A schedule worked out for the tokens of one call.

    Attributes:
        fused: [B, T] bool, tokens that are fused with the state they read. All others pass on unchanged.
        writes: [B, T] bool, tokens whose carried state later tokens may read.
        source: [B, T] int64, the column whose state a token reads, or CARRIED, or INITIAL.
        positions: [B, T] int64, 0-based position of a token in its document (0 for padding).
        labels: [B, T] int64, as in `Tokens`.
        stages: column ranges in order. No fused token reads a state written in its own range, in any row, so each range
            can run in parallel once those before it are done.
        source_after: [B, T] int64, as `source`, for the token that would follow each column in its document.
        depth: the largest number of stages that a document would have by itself. Jacobi iteration is exact after as many
            iterations. It is smaller than the number of stages if a row holds several documents, or chunks do not line up.
        first_fused: no token before this column is fused, in any row (0 if not known without asking the device).
        leading: [B, T] bool, real tokens before the first fused one of their document, in this call: what they compute owes
            nothing to any state.
        leading_stop: behind the last of those whose state a fused token reads, in any row (0 if there is none).
        final_num_tokens, final_segment: [B] int64, as in `RecurrentState`, after this call.
    """

    fused: Tensor
    writes: Tensor
    source: Tensor
    positions: Tensor
    labels: Tensor
    source_after: Tensor
    stages: tuple[Stage, ...]
    depth: int
    first_fused: int
    leading: Tensor
    leading_stop: int
    final_num_tokens: Tensor
    final_segment: Tensor

    @property
    def num_tokens(self) -> int:
        return self.fused.shape[1]

    def behind(self, first: int) -> "Plan":
        """The plan for the columns from `first` on, as a call of their own: what the others wrote is carried into it."""
        fused = self.fused[:, first:]
        source, source_after = (
            _counted_from(first, columns[:, first:]) for columns in (self.source, self.source_after)
        )
        leading = self.leading[:, first:]
        stages, depth, first_fused, leading_stop = _stages(source, fused, leading)
        return replace(
            self,
            fused=fused,
            writes=self.writes[:, first:],
            source=source,
            positions=self.positions[:, first:],
            labels=self.labels[:, first:],
            source_after=source_after,
            stages=stages,
            depth=depth,
            first_fused=first_fused,
            leading=leading,
            leading_stop=leading_stop,
        )


@dataclass(frozen=True)
class Schedule:
    """The reading pattern of a model.

    Args:
        feedback_interval: B of RLT. 1: a token reads the state of the token before it (RLT-1, T2MLR). B > 1: all
            tokens of a chunk of B read the state of the last token of the previous complete chunk (RLT-2); chunks are
            counted from the first token of each document. None: nothing is read (RLT-0).

    Raises:
        ValueError: the interval is neither None nor an integer of at least 1.

    Example:
        >>> tokens = Tokens(labels=torch.zeros(1, 6, dtype=torch.int64), recurrent=torch.ones(1, 6, dtype=torch.bool))
        >>> state = RecurrentState.start(torch.zeros(1, 8))
        >>> Schedule(feedback_interval=4).plan(tokens, state).source.tolist()
        [[-2, -2, -2, -2, 3, 3]]
        >>> [(stage.start, stage.stop) for stage in Schedule(feedback_interval=4).plan(tokens, state).stages]
        [(0, 4), (4, 6)]
    """

    feedback_interval: int | None = 1

    def __post_init__(self) -> None:
        interval = self.feedback_interval
        if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 1):
            raise ValueError(
                f"feedback_interval={interval!r} is not allowed: give 1 (every token reads the one before it), an "
                "integer B > 1 (the end of the last complete chunk of B tokens), or None (no feedback)."
            )

    def plan(self, tokens: Tokens, state: RecurrentState) -> Plan:
        """Work out which token reads what, given the state that the call continues from."""
        is_real = tokens.is_real
        starts, continues = _document_starts(tokens.labels, state.segment)
        positions = _positions(is_real, starts, continues, state.num_tokens)
        last_start = _last_column(starts)
        writes, fused = self._writes(is_real, positions), is_real & tokens.recurrent
        if self.feedback_interval is None:
            fused = torch.zeros_like(fused)

        last_write = _last_column(writes)
        source_after = torch.where(last_write >= last_start, last_write, INITIAL)
        no_start = last_start < 0
        source_after = torch.where(no_start & (last_write < 0), torch.where(continues, CARRIED, INITIAL), source_after)
        source = _source_of_each(source_after, starts, continues)
        leading = is_real & (_counted_in_document(fused, starts) == 0)
        stages, depth, first_fused, leading_stop = _stages(source, fused, leading)
        last_real = _last_column(is_real)[:, -1]
        row = torch.arange(len(last_real), device=last_real.device)
        seen = last_real >= 0
        return Plan(
            fused=fused,
            writes=writes,
            source=source,
            positions=positions,
            labels=tokens.labels,
            source_after=source_after,
            stages=stages,
            depth=depth,
            first_fused=first_fused,
            leading=leading,
            leading_stop=leading_stop,
            final_num_tokens=torch.where(seen, positions[row, last_real] + 1, state.num_tokens),
            final_segment=torch.where(seen, tokens.labels[row, last_real], state.segment),
        )

    def plan_next(self, state: RecurrentState) -> Plan:
        """What `plan` gives for one more token in every row, real, recurrent and of the row's current document.

        Decoding makes this plan for each token: it takes few operations, and asks the device nothing.

        Args:
            state: every row of it has begun a document.
        """
        num_before = state.num_tokens[:, None]
        is_real = torch.ones_like(num_before, dtype=torch.bool)
        source, own = torch.full_like(num_before, CARRIED), torch.zeros_like(num_before)
        reads, all_write = self.feedback_interval is not None, self.feedback_interval == 1
        writes = is_real if all_write else self._writes(is_real, num_before)
        return Plan(
            fused=is_real if reads else torch.zeros_like(is_real),
            writes=writes,
            source=source,
            positions=num_before,
            labels=state.segment[:, None],
            source_after=own if all_write else torch.where(writes, own, source),
            stages=(Stage(0, 1, any_fused=reads, any_initial=False),),
            depth=1,
            first_fused=0,
            leading=torch.zeros_like(is_real) if reads else is_real,
            leading_stop=0,
            final_num_tokens=state.num_tokens + 1,
            final_segment=state.segment,
        )

    def _writes(self, is_real: Tensor, positions: Tensor) -> Tensor:
        if self.feedback_interval is None:
            return torch.zeros_like(is_real)
        return is_real & ((positions + 1) % self.feedback_interval == 0)


def _last_column(flags: Tensor) -> Tensor:
    """[B, T] for each column, the last flagged column up to and including it, or -1."""
    columns = torch.arange(flags.shape[1], device=flags.device)
    return torch.where(flags, columns, -1).cummax(dim=1).values


def _document_starts(labels: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """[B, T] bool: tokens that open a document; [B, 1] bool: rows whose first document began in an earlier call."""
    is_real = labels != PADDING
    # Labels never decrease along a row, so the running maximum is the label of the last real token.
    before = torch.cat([segment[:, None], labels[:, :-1]], dim=1).cummax(dim=1).values
    starts = is_real & (labels != before)
    return starts, (segment != PADDING)[:, None]


def _positions(is_real: Tensor, starts: Tensor, continues: Tensor, num_tokens: Tensor) -> Tensor:
    rank = is_real.cumsum(dim=1) - 1
    start_rank = torch.where(starts, rank, -1).cummax(dim=1).values
    carried_rank = torch.where(continues, -num_tokens[:, None], 0)
    offset = torch.where(start_rank >= 0, start_rank, carried_rank)
    return torch.where(is_real, rank - offset, 0)


def _source_of_each(source_after: Tensor, starts: Tensor, continues: Tensor) -> Tensor:
    """A token reads what was left after the column before it, unless it opens a document."""
    first = torch.where(continues, CARRIED, INITIAL)
    before = torch.cat([first, source_after[:, :-1]], dim=1)
    return torch.where(starts, INITIAL, before)


def _counted_from(first: int, source: Tensor) -> Tensor:
    """Sources in a call that begins with column `first`: earlier columns are carried into it."""
    return torch.where(source >= first, source - first, source.clamp(max=CARRIED))


def _counted_in_document(flags: Tensor, starts: Tensor) -> Tensor:
    """[B, T] for each column, how many flagged ones its document has had so far, itself included."""
    counts = flags.long().cumsum(dim=1)
    return counts - torch.where(starts, counts - flags.long(), 0).cummax(dim=1).values


def _stages(source: Tensor, fused: Tensor, leading: Tensor) -> tuple[tuple[Stage, ...], int, int, int]:
    """The stages of all rows together, the depth of the deepest document, the first column that may hold a fused token, and
    where the leading tokens that are read end. One transfer from the device."""
    if source.shape[1] == 1:  # no need to ask the device, which would hold up every step of decoding
        return (Stage(0, 1, any_fused=True, any_initial=True),), 1, 0, 0
    read = torch.where(fused, source, INITIAL)
    newest = read.clamp(min=CARRIED).cummax(dim=1).values
    before = torch.cat([torch.full_like(newest[:, :1], CARRIED), newest[:, :-1]], dim=1)
    # Each state of this call that a document reads opens one stage of it: none is written between a read and its source.
    opened = (newest > before).cumsum(dim=1)
    # A document opens none before its first tokens, which read the initial state, have passed.
    depth = 1 + (opened - torch.where(source == INITIAL, opened, 0).cummax(dim=1).values).amax()
    initial = fused & (source == INITIAL)
    reads_leading = fused & (source >= 0) & leading.gather(1, source.clamp(min=0))
    leading_read = torch.where(reads_leading, source + 1, 0)
    each = (read, fused, initial, leading_read)
    facts = torch.stack([*(flags.amax(dim=0).long() for flags in each), depth.expand(len(read[0]))]).tolist()
    last_read, any_fused, any_initial, leading_stops, depths = facts
    edges = [0]
    for column, newest_read in enumerate(last_read):
        if newest_read >= edges[-1]:
            edges.append(column)
    edges.append(len(last_read))
    stages = tuple(
        Stage(start, stop, any(any_fused[start:stop]), any(any_initial[start:stop]))
        for start, stop in itertools.pairwise(edges)
    )
    first_fused = next((column for column, is_fused in enumerate(any_fused) if is_fused), 0)
    return stages, depths[0], first_fused, max(leading_stops)
