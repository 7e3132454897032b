"""The map sigma(t) against a count done by hand, token by token."""

import dataclasses
import itertools

import pytest
import torch

from crosscurrent.recurrence import PADDING, Plan, RecurrentState, Schedule, Tokens
from crosscurrent.recurrence.schedule import CARRIED, INITIAL


def by_hand(
    labels: list[int], interval: int | None, num_tokens: int, segment: int
) -> tuple[list[int | None], list[int]]:
    """(source, position) of each real token, and PADDING's stand-ins, for one row."""
    readable = CARRIED if segment != PADDING else INITIAL
    sources: list[int | None] = []
    positions = []
    for column, label in enumerate(labels):
        if label == PADDING:
            sources.append(None)
            positions.append(0)
            continue
        if label != segment:
            segment, num_tokens, readable = label, 0, INITIAL
        sources.append(readable)
        positions.append(num_tokens)
        num_tokens += 1
        if interval is not None and num_tokens % interval == 0:
            readable = column
    return sources, positions


ROWS = [
    [0, 0, 0, 0, 0, 0, 0, 0, 0],
    [PADDING, PADDING, 0, 0, 0, 0, 0, 0, 0],
    [0, 0, 0, 0, 0, PADDING, PADDING, PADDING, PADDING],
    [0, PADDING, 0, 0, PADDING, 1, 1, 1, 4],
    [PADDING] * 9,
    [2, 2, 3, 4, 4, 4, 4, 4, 5],
]


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 20, None])
@pytest.mark.parametrize(("num_tokens", "segment"), [(0, PADDING), (1, 0), (3, 0), (4, 0)])
def test_against_counting_by_hand(interval: int | None, num_tokens: int, segment: int) -> None:
    labels = torch.tensor(ROWS)
    state = RecurrentState(
        torch.zeros(len(ROWS), 2), torch.full((len(ROWS),), num_tokens), torch.full((len(ROWS),), segment)
    )
    plan = Schedule(interval).plan(Tokens(labels, torch.ones_like(labels, dtype=torch.bool)), state)
    for row, row_labels in enumerate(ROWS):
        sources, positions = by_hand(row_labels, interval, num_tokens, segment)
        for column, source in enumerate(sources):
            if source is not None:
                assert plan.source[row, column] == source, (row, column)
        assert plan.positions[row].tolist() == positions
    assert bool(plan.fused.any()) is (interval is not None)


@pytest.mark.parametrize("interval", [1, 2, 3, None])
def test_stages_cover_all_columns_and_never_read_themselves(interval: int | None) -> None:
    labels = torch.tensor(ROWS)
    recurrent = torch.ones_like(labels, dtype=torch.bool)
    recurrent[0, :5] = False
    plan = Schedule(interval).plan(Tokens(labels, recurrent), RecurrentState.start(torch.zeros(len(ROWS), 2)))
    assert plan.stages[0].start == 0 and plan.stages[-1].stop == 9
    assert all(first.stop == second.start for first, second in itertools.pairwise(plan.stages))
    for stage in plan.stages:
        fused = plan.fused[:, stage.columns]
        read = plan.source[:, stage.columns][fused]
        assert bool((read < stage.start).all())
        assert stage.any_fused is bool(fused.any()) and stage.any_initial is bool((read == INITIAL).any())


def test_depth_is_that_of_the_deepest_row_alone() -> None:
    """Rows whose chunks do not line up take more stages together than any of them alone."""
    labels = torch.tensor([[PADDING] * pads + [0] * (13 - pads) for pads in range(4)])
    tokens = Tokens(labels, torch.ones_like(labels, dtype=torch.bool))
    plan = Schedule(4).plan(tokens, RecurrentState.start(torch.zeros(4, 2)))
    alone = [
        Schedule(4).plan(Tokens(labels[row : row + 1], tokens.recurrent[:1]), RecurrentState.start(torch.zeros(1, 2)))
        for row in range(4)
    ]
    assert [len(one.stages) for one in alone] == [one.depth for one in alone] == [4, 3, 3, 3]
    assert plan.depth == 4 < len(plan.stages)


def test_depth_of_packed_documents_is_that_of_the_deepest() -> None:
    labels = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2]])
    tokens = Tokens(labels, torch.ones_like(labels, dtype=torch.bool))
    plan = Schedule(1).plan(tokens, RecurrentState.start(torch.zeros(1, 2)))
    assert plan.depth == 5 < len(plan.stages)
    going_on = RecurrentState(torch.zeros(1, 2), torch.tensor([7]), torch.tensor([0]))
    assert Schedule(1).plan(tokens, going_on).depth == 5


def test_fewest_possible_stages() -> None:
    labels = torch.zeros(1, 12, dtype=torch.int64)
    recurrent = torch.ones(1, 12, dtype=torch.bool)
    start = RecurrentState.start(torch.zeros(1, 2))
    assert len(Schedule(1).plan(Tokens(labels, recurrent), start).stages) == 12
    assert len(Schedule(4).plan(Tokens(labels, recurrent), start).stages) == 3
    assert len(Schedule(None).plan(Tokens(labels, recurrent), start).stages) == 1
    recurrent[:, :8] = False  # a prompt that is not recurrent runs in one go, its successor reads it
    assert Schedule(1).plan(Tokens(labels, recurrent), start).depth == 5


def test_chunks_go_on_across_calls() -> None:
    """A prompt of 6 at B = 4: tokens 5 to 8 all read y_4, and y_6 does not enter the register."""
    schedule = Schedule(4)
    start = RecurrentState.start(torch.zeros(1, 2))
    prompt = schedule.plan(Tokens(torch.zeros(1, 6, dtype=torch.int64), torch.ones(1, 6, dtype=torch.bool)), start)
    assert prompt.source.tolist() == [[INITIAL] * 4 + [3, 3]] and prompt.source_after[:, -1].tolist() == [3]
    state = RecurrentState(start.register, prompt.final_num_tokens, prompt.final_segment)
    rest = schedule.plan(Tokens(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool)), state)
    assert rest.source.tolist() == [[CARRIED, CARRIED, 1, 1]]


@pytest.mark.parametrize("interval", [1, 2, 3, None])
def test_the_plan_of_one_more_token_is_the_general_plan(interval: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts, segment = (torch.randint(low, 9, (4,), generator=generator) for low in (1, 0))
        state = RecurrentState(torch.randn(4, 8, generator=generator), counts, segment)
        tokens = Tokens(labels=segment[:, None], recurrent=torch.ones(4, 1, dtype=torch.bool))
        found, expected = Schedule(interval).plan_next(state), Schedule(interval).plan(tokens, state)
        for field in dataclasses.fields(Plan):
            left, right = getattr(found, field.name), getattr(expected, field.name)
            if field.name == "stages":
                assert [(stage.start, stage.stop) for stage in left] == [(stage.start, stage.stop) for stage in right]
                assert left[0].any_fused == bool(right[0].any_fused and expected.fused.any())
                assert left[0].any_initial == bool((expected.source == INITIAL).any())
            elif isinstance(left, torch.Tensor):
                assert left.dtype == right.dtype and torch.equal(left, right), field.name
            else:
                assert left == right, field.name
