"""The processes of a run: one, or several that torchrun started."""

import os

import torch


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def num_processes() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_all() -> None:
    """Go on when all are here."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def from_first(number: int) -> int:
    """The number that the first process gives."""
    if num_processes() == 1:
        return number
    given = [number]
    torch.distributed.broadcast_object_list(given, src=0)
    return given[0]


def leave_together() -> None:
    """End the group of processes: the first one goes on alone, and the others may end without being missed."""
    wait_for_all()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
