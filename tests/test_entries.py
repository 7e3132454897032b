"""Sequences that grow in place: what is read, and what is sent back, is as with concatenation."""

import torch
from torch import Tensor

from crosscurrent.recurrence.entries import Entries
from tests.subjects import largest_difference

SHAPE = (2, 3, 1, 5)


def new(count: int, seed: int) -> Tensor:
    shape = (*SHAPE[:2], count, SHAPE[3])
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def used(tensor: Tensor, seed: int) -> Tensor:
    return (
        tensor * torch.randn(tensor.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ).sum()


def test_parts_and_gradients_are_those_of_concatenation() -> None:
    first, later = new(2, 0), [new(count, seed) for seed, count in enumerate((1, 3, 1), start=1)]
    entries, plain = Entries(first, room=7), first
    total, expected = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for step, added in enumerate(later):
        entries, plain = entries.append(added), torch.cat([plain, added], dim=2)
        for start in (0, 1, plain.shape[2] - 1):
            part = entries.part(start, plain.shape[2]).tensor()
            assert torch.equal(part, plain[:, :, start:])
            total, expected = total + used(part, step), expected + used(plain[:, :, start:], step)
    leaves = [first, *later]
    found = torch.autograd.grad(total, leaves, retain_graph=True)
    assert largest_difference(found, torch.autograd.grad(expected, leaves)) < 1e-14
    assert largest_difference(found, torch.autograd.grad(total, leaves)) == 0.0


def test_whoever_appends_again_gets_a_copy() -> None:
    first, one, other = new(2, 0), new(1, 1), new(1, 2)
    entries = Entries(first, room=4)
    left, right = entries.append(one), entries.append(other)
    assert torch.equal(left.whole(), torch.cat([first, one], dim=2))
    assert torch.equal(right.whole(), torch.cat([first, other], dim=2))
    total = used(left.whole(), 3) + used(right.whole(), 4)
    plain = used(torch.cat([first, one], dim=2), 3) + used(torch.cat([first, other], dim=2), 4)
    leaves = [first, one, other]
    assert largest_difference(torch.autograd.grad(total, leaves), torch.autograd.grad(plain, leaves)) < 1e-14


def test_a_backward_pass_leaves_nothing_to_the_next() -> None:
    """One pass asks for a late entry only: what readers send to earlier ones must not be found by the next pass."""
    first, later = new(1, 0), new(1, 1)
    entries = Entries(first, room=2).append(later)
    total = used(entries.whole(), 2)
    torch.autograd.grad(total, [later], retain_graph=True)
    (found,) = torch.autograd.grad(total, [first])
    assert largest_difference(found, torch.autograd.grad(used(torch.cat([first, later], dim=2), 2), [first])[0]) == 0.0


def test_detached_entries_send_nothing_back() -> None:
    first, later = new(2, 0), new(1, 1)
    entries = Entries(first, room=3)
    cut = entries.detach().append(later)
    total = used(entries.whole(), 2) + used(cut.whole(), 3)
    found = torch.autograd.grad(total, [first, later])
    plain = used(first, 2) + used(torch.cat([first.detach(), later], dim=2), 3)
    assert largest_difference(found, torch.autograd.grad(plain, [first, later])) < 1e-14
