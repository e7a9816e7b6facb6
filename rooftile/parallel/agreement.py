"""Checks over a group that every rank was given the same problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from rooftile.errors import InvalidInput, Unsupported
from rooftile.parallel.groups import Ranks
from rooftile.runtime.arguments import shown


class Sized(Protocol):
    """A call whose `sizes` have to be the same on every rank."""

    @property
    def sizes(self) -> tuple[Any, ...]: ...


Checked = TypeVar("Checked", bound=Sized)


def agreed(ranks: Ranks, check: Callable[[], Checked]) -> Checked:
    """Returns what `check` returns; raises on every rank if it raises on one, or if the ranks' sizes differ."""
    call, refusal = None, None
    try:
        call = check()
    except (InvalidInput, Unsupported) as error:
        refusal = error
    found: list[Any] = [None] * ranks.count
    # who refuses takes part, so that no rank waits for it
    dist.all_gather_object(found, str(refusal) if call is None else call.sizes, group=ranks.group)
    if refusal is not None:
        raise refusal
    assert call is not None
    for rank, other in enumerate(found):
        if isinstance(other, str):
            raise InvalidInput(f"rank {rank} refused its arguments: {other}")
        if other != call.sizes:
            raise InvalidInput(
                f"rank {rank} was given {shown(other)}; rank {ranks.rank} was given {shown(call.sizes)}, and all must agree"
            )
    return call
