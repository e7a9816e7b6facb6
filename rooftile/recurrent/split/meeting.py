"""The agreement of ranks before a call's first state travels: with `validate=True` no rank waits for one that has refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.recurrent.split.part import Part
from rooftile.runtime.operators import wants_grad
from rooftile.runtime.ranks import Ranks, agreed, ranks_of

R = TypeVar("R")


class _Meeting:
    """One call's agreement, in which every rank takes part once: with its problem, or with the sentence of its refusal."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.is_held = ranks, False

    def hold(self, problem: tuple[Any, ...], refusal: InvalidInput | Unsupported | None = None) -> None:
        def check() -> tuple[Any, ...]:
            if refusal is not None:
                raise refusal
            return problem

        self.is_held = True
        agreed(self._ranks, check, lambda given: given)


# the agreement of this thread's call; None where a caller asks for none
_CURRENT: ContextVar[_Meeting | None] = ContextVar("rooftile_agreement_of_ranks", default=None)


def met(function: Callable[..., R], arguments: tuple[Any, ...], given: Mapping[str, Any]) -> R:
    """Calls a function that `agree`s before its first collective; with validate, ranks that refuse before take part in it."""
    if not given.get("validate"):
        return function(*arguments, **given)
    meeting = _Meeting(ranks_of(given["group"]))
    token = _CURRENT.set(meeting)
    try:
        return function(*arguments, **given)
    except (InvalidInput, Unsupported) as error:
        if not meeting.is_held:
            meeting.hold((), error)
        raise
    finally:
        _CURRENT.reset(token)


def agree(
    part: Part, name: str, tokens: Mapping[str, Tensor | None], shared: Mapping[str, Tensor | None], **options: Any
) -> None:  # fmt: skip
    """Raises InvalidInput on every rank if the ranks were given different problems, where the caller asked for it.

    Args:
        tokens: tensors with an axis of tokens, the second one, or in a pack the first one: any number of them is right.
        shared: tensors that every rank holds.
        options: whatever else has to be the same.
    """
    meeting = _CURRENT.get()
    if meeting is None:
        return
    axis = 1 if part.cu is None else 0
    problem = [_seen(key, x, axis) for key, x in tokens.items()] + [_seen(key, x, None) for key, x in shared.items()]
    # a rank without gradients would take no part in a backward
    options |= {"cu": part.cu, "gradients": wants_grad(*tokens.values(), *shared.values())}
    meeting.hold((f"a call of {name}", *problem, *(f"{key} {value!r}" for key, value in options.items())))


def _seen(name: str, x: Tensor | None, axis: int | None) -> str:
    name = name.rstrip("?")
    if x is None:
        return f"{name} None"
    sizes = ["any" if n == axis else str(size) for n, size in enumerate(x.shape)]
    return f"{name} ({', '.join(sizes)}) in {str(x.dtype).removeprefix('torch.')}"
