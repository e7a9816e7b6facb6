"""The ranks that share a sequence: a process group, or a one-dimensional DeviceMesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.arguments import shown


@dataclass(frozen=True, slots=True)
class Ranks:
    """A group, this process's rank in it, and their number."""

    group: dist.ProcessGroup
    rank: int
    count: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a two-dimensional DeviceMesh: rows of `inner` ranks, and the ranks at this one's place in each row."""

    outer: Ranks
    inner: Ranks

    @property
    def rank(self) -> int:
        """This process's rank, row by row."""
        return self.outer.rank * self.inner.count + self.inner.rank

    @property
    def count(self) -> int:
        """The number of ranks in all rows."""
        return self.outer.count * self.inner.count


def grid_of(group: Any) -> Ranks | Grid:
    """Returns the ranks of a group as `ranks_of` does, or those of a DeviceMesh of two dimensions."""
    if getattr(group, "ndim", 1) == 2 and hasattr(group, "get_group") and dist.is_available() and dist.is_initialized():
        if group.get_coordinate() is None:
            raise InvalidInput("group does not contain this process; call this on its own ranks alone")
        return Grid(ranks_of(group.get_group(0)), ranks_of(group.get_group(1)))
    return ranks_of(group)


def ranks_of(group: Any) -> Ranks:
    """Returns the group that a caller gave: a process group, a one-dimensional DeviceMesh, or None for the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidInput(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first, "
            "and start the program with torchrun"
        )
    if group is None:
        group = dist.group.WORLD
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise InvalidInput(f"group is a mesh of {group.ndim} dimensions; must have one: name it, as in mesh['cp']")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInput("group does not contain this process; call this on its own ranks alone")
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidInput(f"group is {shown(group)}; must be a process group, a one-dimensional DeviceMesh, or None")
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidInput("group does not contain this process; call this on its own ranks alone")
    return Ranks(group, rank, dist.get_world_size(group))


def check_device(name: str, x: Tensor, ranks: Ranks | Grid) -> None:
    """Raises InvalidInput unless the group can move tensors of x's device."""
    if isinstance(ranks, Grid):
        ranks = ranks.inner
    served = {str(kind).split(":")[0] for kind in getattr(ranks.group, "_device_types", ())}
    if served and x.device.type not in served:
        raise InvalidInput(
            f"{name} is on {x.device}; the group's backend moves tensors of {', '.join(sorted(served))}: "
            "make the group with the device's backend (nccl for cuda, gloo for cpu)"
        )


def contiguous(tokens: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Returns the range [start, stop) of tokens that each rank holds; where P does not divide, the first hold one more.

    Example:
        >>> contiguous(10, 4)
        ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    ends = [rank * (tokens // ranks) + min(rank, tokens % ranks) for rank in range(ranks + 1)]
    return tuple(pairwise(ends))


Checked = TypeVar("Checked")


def gathered_objects(ranks: Ranks | Grid, own: Any) -> list[Any]:
    """Returns what every rank gave, in the order of the ranks."""
    if isinstance(ranks, Grid):
        return [x for row in gathered_objects(ranks.outer, gathered_objects(ranks.inner, own)) for x in row]
    found: list[Any] = [None] * ranks.count
    dist.all_gather_object(found, own, group=ranks.group)
    return found


def broadcast(ranks: Ranks | Grid, x: Tensor) -> None:
    """Gives every rank the first rank's tensor, in place."""
    if isinstance(ranks, Grid):
        # down the first column, then along each row
        broadcast(ranks.outer, x)
        broadcast(ranks.inner, x)
    else:
        dist.broadcast(x, dist.get_global_rank(ranks.group, 0), group=ranks.group)


def agreed(ranks: Ranks | Grid, check: Callable[[], Checked], problem_of: Callable[[Checked], tuple[Any, ...]]) -> Checked:
    """Returns what `check` returns; raises on every rank if it refuses on one, or if the ranks' problems differ."""
    refusal: InvalidInput | Unsupported | None = None
    problem: tuple[Any, ...] = ()
    try:
        call = check()
        problem = problem_of(call)
    except (InvalidInput, Unsupported) as error:
        refusal = error
    # a rank that refuses takes part, so that no other waits for it
    found = gathered_objects(ranks, problem if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(found):
        if isinstance(other, str):
            raise InvalidInput(f"rank {rank} refused its arguments: {other}")
        if other != found[0]:
            given, due = _difference(other, found[0])
            raise InvalidInput(f"rank {rank} was given {given}; rank 0 was given {due}, and all must agree")
    return call


def _difference(given: tuple[Any, ...], due: tuple[Any, ...]) -> tuple[str, str]:
    """Returns the first part in which two problems differ, where both say it in words; else the whole problems."""
    if len(given) == len(due):
        one, other = next((a, b) for a, b in zip(given, due, strict=True) if a != b)
        if isinstance(one, str) and isinstance(other, str):
            return one, other
    return shown(given), shown(due)


def check_agreement(ranks: Ranks, problem: tuple[Any, ...]) -> None:
    """Raises InvalidInput on every rank if the ranks were given different problems."""
    agreed(ranks, lambda: problem, lambda given: given)
