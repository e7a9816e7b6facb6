"""Activations in the host's memory between forward and backward.

In the forward a tensor that autograd saves is copied to pinned memory on a side stream. The main stream waits for a copy only
when a few more tensors have been saved, and then the memory is free again. In the backward each tensor that is read starts the
copies of those that were saved just before it, so they are there when they are needed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import shown, whole

# tensors whose copies may be on their way while the forward goes on, and tensors that come back before they are needed
AHEAD = 4


@contextmanager
def offload(*, min_bytes: int = 1 << 20) -> Iterator[None]:
    """Keeps the tensors that autograd saves inside this context in the host's memory until the backward reads them.

    With activation checkpointing that does not re-enter (`use_reentrant=False`) what is saved is each block's input, so a GPU
    holds the activations of one block. On a CPU tensors are copied, which saves nothing and computes the same.

    Args:
        min_bytes: smaller tensors stay where they are. So do parameters and views of them, tensors of subclasses, and tensors
            that are on no GPU and no CPU.

    The host needs pinned memory for all that is saved: for L blocks under checkpoints L T D numbers. A saved tensor that is
    changed in place before its copy has ended raises in the backward, as it would without this context. A compiled function
    that enters the context runs its part inside of it without compilation; one that is called inside of it stays compiled.
    `torch.func.grad` takes no hooks of saved tensors, these or others.

    Example:
        >>> with offload():                                                                   # doctest: +SKIP
        ...     loss = model(tokens).loss                                                     # doctest: +SKIP
        >>> loss.backward()                                                                   # doctest: +SKIP
    """
    size = whole(min_bytes)
    if size is None or size < 0:
        raise InvalidInput(f"min_bytes is {shown(min_bytes)}; must be a number of bytes, at least 0")
    host = _Host(size)
    with torch.autograd.graph.saved_tensors_hooks(host.pack, host.unpack):
        yield
    host.settle(0)


class _Saved:
    """A saved tensor: its copy on the host, and the tensor itself until the copy has ended."""

    def __init__(self, x: Tensor, copy: Tensor, number: int) -> None:
        # the tensor that came back, with the event after which it is there
        self.back: weakref.ref[Tensor] | None = None
        self.held: Tensor | None = None
        self.arrived: Any = None
        self.x: Tensor | None = x
        self.copy, self.device, self.version, self.number = copy, x.device, x._version, number
        self.copied: Any = None
        self.changed = False

    def release(self) -> None:
        """Lets the tensor go; later work of the current stream may have its memory."""
        if self.x is not None:
            if self.copied is not None:
                torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.changed = self.x._version != self.version
            self.x = None

    def __del__(self) -> None:
        # memory that a copy is on its way to must not be given to others before
        if self.held is not None and self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)


class _Host:
    """Moves the saved tensors of one context."""

    def __init__(self, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.streams: dict[torch.device, Any] = {}
        self.leaving: deque[_Saved] = deque()
        # weak: a saved tensor lives as long as the graph that needs it
        self.all: list[weakref.ref[_Saved]] = []
        # a tensor that three projections read is saved once, and comes back once
        self.recent: deque[Tensor] = deque(maxlen=2)

    # a compiler that traces into the context knows neither streams nor weak references
    @torch.compiler.disable
    def pack(self, x: Tensor) -> Any:
        if not self._moves(x):
            return x
        for saved in self.leaving:
            if _is_same(saved, x):
                return saved
        saved = _Saved(x, _empty_on_host(x), len(self.all))
        if x.is_cuda:
            side = self._stream(x.device)
            side.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(side):
                saved.copy.copy_(x, non_blocking=True)
                saved.copied = side.record_event()
        else:
            saved.copy.copy_(x)
        self.all.append(weakref.ref(saved))
        self.leaving.append(saved)
        self.settle(AHEAD)
        return saved

    @torch.compiler.disable
    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.settle(0)
        if saved.changed:
            raise InvalidInput(
                f"a saved tensor {tuple(saved.copy.shape)} was changed in place inside of offload() while it was copied; "
                "save a clone of it, or change it outside of the context"
            )
        x = self._fetch(saved)
        if saved.arrived is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.arrived)
        saved.held = None
        self.recent.append(x)
        for number in range(saved.number - 1, max(saved.number - 1 - AHEAD, -1), -1):
            before = self.all[number]()
            if before is not None and before.device.type == "cuda":
                before.held = self._fetch(before)
        return x

    @torch.compiler.disable
    def settle(self, most: int) -> None:
        """Lets the oldest tensors go until at most some copies are on their way."""
        while len(self.leaving) > most:
            self.leaving.popleft().release()

    def _moves(self, x: Tensor) -> bool:
        own = x if x._base is None else x._base
        if isinstance(own, torch.nn.Parameter) or type(x) is not Tensor or x.layout != torch.strided:
            return False
        return x.device.type in ("cuda", "cpu") and x.nbytes >= max(self.min_bytes, 1)

    def _stream(self, device: torch.device) -> Any:
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        return self.streams[device]

    def _fetch(self, saved: _Saved) -> Tensor:
        """Returns the tensor, which may still be on its way."""
        there = saved.back() if saved.back is not None else None
        if there is not None:
            return there
        x = torch.empty_strided(saved.copy.size(), saved.copy.stride(), dtype=saved.copy.dtype, device=saved.device)
        if x.is_cuda:
            side = self._stream(x.device)
            # its memory may have been another tensor's, which the main stream still reads
            side.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(side):
                x.copy_(saved.copy, non_blocking=True)
                saved.arrived = side.record_event()
        else:
            x.copy_(saved.copy)
        saved.back = weakref.ref(x)
        return x


def _is_same(saved: _Saved, x: Tensor) -> bool:
    """Whether x is what was saved just before, as the input of three projections is."""
    other = saved.x
    return (
        other is not None
        and other.data_ptr() == x.data_ptr()
        and (other.dtype, other.shape, other.stride()) == (x.dtype, x.shape, x.stride())
        and x._version == saved.version
    )


def _empty_on_host(x: Tensor) -> Tensor:
    """Returns memory for x in the order in which it lies, without gaps."""
    like = torch.empty_like(x, device="meta")
    return torch.empty_strided(like.size(), like.stride(), dtype=x.dtype, pin_memory=x.is_cuda)
