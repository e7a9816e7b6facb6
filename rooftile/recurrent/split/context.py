"""The place where `rooftile.parallel.context` takes calls of recurrences, below the parallel room.

A context belongs to the thread that entered it. A backward that runs a forward again (activation checkpointing) runs outside of
it; such a call would start from a zero state on every rank, so it is refused unless the checkpoint carries the context.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.recurrent.split.meeting import met
from rooftile.runtime.operators import in_backward

P = ParamSpec("P")
R = TypeVar("R")


class SplitSequence(NamedTuple):
    """The sequence of a context: its group, its layout, the offsets of packed documents, and the places of this rank's tokens."""

    group: Any
    layout: str
    cu: Tensor | None
    # takes the number of this rank's tokens
    places: Callable[[int], Tensor]


# the sequence that this thread's calls share with other ranks; None outside of any context, False where a caller has left it
CURRENT: ContextVar[SplitSequence | bool | None] = ContextVar("rooftile_split_recurrence", default=None)


class _Entered:
    """Holds `call` once a thread of the process has entered a context; a compiled graph guards on it."""

    call: Callable[..., Any] | None = None
    places: Callable[[int], Tensor | None] | None = None


ENTERED = _Entered()


def enter(sequence: SplitSequence | bool) -> Token[SplitSequence | bool | None]:
    """Makes calls of this thread share a sequence, or False share none; `CURRENT.reset` takes the token."""
    if ENTERED.call is None:
        # no graph may keep what a thread's context was; the decorator at the top of a module would import Dynamo
        ENTERED.call, ENTERED.places = torch.compiler.disable(_call), torch.compiler.disable(_places)
    return CURRENT.set(sequence)


def follows_context(*tokens: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function of tokens (B, T, ...), named by their arguments, run over the group of a context.

    The function takes `group=` and `cu=`, and returns outputs with the axes of its first argument, or a tuple that begins with
    them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*arguments: P.args, **given: P.kwargs) -> R:
            if given.get("group") is not None:
                from rooftile.runtime.uncompiled import uncompiled

                found: R = uncompiled(met, (function, arguments, given))
                return found
            if ENTERED.call is not None and (answer := ENTERED.call(function, tokens, arguments, given)) is not None:
                return answer
            return function(*arguments, **given)

        return run

    return decorate


def _call(function: Any, tokens: tuple[str, ...], arguments: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Returns what a call inside a context gives, None for a call outside of any."""
    current, name = CURRENT.get(), function.__name__
    if current is None and in_backward():
        raise Unsupported(
            f"{name} ran again in a backward, outside of the rooftile.parallel.context that the process has entered; pass "
            "context_fn=rooftile.parallel.checkpoint_contexts to torch.utils.checkpoint, with use_reentrant=False"
        )
    if not isinstance(current, SplitSequence):
        return None
    if "group" not in signature(function).parameters:
        raise Unsupported(f"{name} inside rooftile.parallel.context; has no form on split sequences: call it outside of it")
    if current.layout != "contiguous":
        raise Unsupported(
            f"{name} inside rooftile.parallel.context with layout {current.layout!r}; a recurrence needs consecutive tokens on "
            "each rank: write context(..., layout='contiguous'), and give `shard` and `positions` the same layout"
        )
    if given.get("cu") is not None:
        raise Unsupported(
            f"cu of {name} inside rooftile.parallel.context; give the whole pack's offsets to the context (cu=), and this "
            "rank's tokens to the call with a batch of 1"
        )
    bound = {**signature(function).bind(*arguments, **given).arguments, "group": current.group, "cu": current.cu}
    if current.cu is None:
        return met(function, (), bound)
    for argument in tokens:
        x = bound.get(argument)
        if isinstance(x, Tensor):
            if x.shape[:1] != (1,):
                raise InvalidInput(
                    f"{argument} is {tuple(x.shape)} inside rooftile.parallel.context(cu=...); a pack has a batch of 1"
                )
            bound[argument] = x.squeeze(0)
    found = met(function, (), bound)
    return (found[0].unsqueeze(0), *found[1:]) if isinstance(found, tuple) else found.unsqueeze(0)


def places_in_context(tokens: int) -> Tensor | None:
    """Returns the places (tokens,) of this rank's tokens in the sequence of a context, on the CPU; None outside of any."""
    return None if ENTERED.places is None else ENTERED.places(tokens)


def _places(tokens: int) -> Tensor | None:
    current = CURRENT.get()
    if current is None and in_backward():
        raise Unsupported(
            "rotary positions ran again in a backward, outside of the rooftile.parallel.context that the process has entered; "
            "pass context_fn=rooftile.parallel.checkpoint_contexts to torch.utils.checkpoint, with use_reentrant=False"
        )
    return current.places(tokens) if isinstance(current, SplitSequence) else None


def refuse_step(name: str) -> None:
    """Raises Unsupported inside a context: a step has one token of each sequence, which no ranks share."""
    if ENTERED.call is not None and isinstance(CURRENT.get(), SplitSequence):
        raise Unsupported(f"{name} inside rooftile.parallel.context; a step has one token of each sequence: call it outside")
