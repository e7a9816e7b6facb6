"""The place on the way of every call where `rooftile.parallel.context` takes it, below the parallel room.

The context belongs to the thread that entered it. A backward that runs a forward again (activation checkpointing) runs outside
of it, in a thread of autograd's own; such a call would compute attention over this rank's tokens alone, so it is refused unless
the checkpoint carries the context.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, Protocol

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact.masks import Mask
from rooftile.exact.spec import Call
from rooftile.runtime.operators import in_backward


class Attend(Protocol):
    """Runs calls of this thread over the ranks of a group."""

    def __call__(self, call: Call) -> tuple[Tensor, Tensor]:
        """Returns o and lse."""
        ...

    def explained(self, call: Call) -> tuple[str, Call]:
        """Says how a call would run, and returns a call that gets the backend of its parts."""
        ...


# the function that runs this thread's calls of attention; None outside of any context, False where a caller has left it
CURRENT: ContextVar[Attend | bool | None] = ContextVar("rooftile_split_attention", default=None)


class _Entered:
    """Holds `attend` once a thread of the process has entered a context; a compiled graph guards on it."""

    attend: Callable[[Call], tuple[Tensor, Tensor] | None] | None = None


ENTERED = _Entered()


def enter(attend: Attend | bool) -> Token[Attend | bool | None]:
    """Makes calls of this thread run by `attend`, or False by nobody; `CURRENT.reset` takes the token."""
    if ENTERED.attend is None:
        # no graph may keep what a thread's context was; the decorator at the top of a module would import Dynamo
        ENTERED.attend = torch.compiler.disable(_attend)
    return CURRENT.set(attend)


def _attend(call: Call) -> tuple[Tensor, Tensor] | None:
    """Returns o and lse of a call inside a context, None for a call outside of any."""
    current = CURRENT.get()
    if current is not None and not isinstance(current, bool):
        return current(call)
    if current is None and in_backward():
        raise Unsupported(
            "rooftile.attention ran again in a backward, outside of the rooftile.parallel.context that the process has entered; "
            "pass context_fn=rooftile.parallel.checkpoint_contexts to torch.utils.checkpoint, with use_reentrant=False "
            "(Transformers: gradient_checkpointing_kwargs)"
        )
    return None


def check_plain(mask: Any, **given: Any) -> None:
    """Raises Unsupported inside a context for what a rank's part of it cannot say, on every rank, whatever its tokens.

    Args:
        mask: the call's.
        given: arguments over all keys, by name.
    """
    if not active():
        return
    if mask is not None and not isinstance(mask, Mask):
        given["mask"] = mask
    for name, value in given.items():
        if value is not None:
            raise Unsupported(
                f"{name} {type(value).__name__} inside rooftile.parallel.context; has masks of rooftile, such as CAUSAL and "
                "Window, and documents by the context's cu="
            )


def explained(call: Call) -> tuple[str, Call] | None:
    """Says how a call inside a context would run, and returns one of which a part's backend is known; None outside of any."""
    current = CURRENT.get()
    return None if current is None or isinstance(current, bool) else current.explained(call)


def active() -> bool:
    """Whether this thread is in a context."""
    return ENTERED.attend is not None and callable(CURRENT.get())
