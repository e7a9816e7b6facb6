"""Weights that are not finite are refused, on a GPU without a wait for each of them.

To look at a number of a GPU the host waits for all that was launched before. So in training a weight that is not finite raises a
flag on its device. Before each step of an optimiser all flags set out for pinned memory, and before the next they are read there:
the GPU still has that step's forward and backward to do. So the error comes when the optimiser is about to take the second step
after the forward, and names the weight whose flag was the first.

The host looks at once on a CPU, in a module in evaluation, before the first step of any optimiser, and in `rooftile.qat.save`,
`convert` and `status`. Compiled code shares one flag, so there the name is the first of all weights that are not finite by then.
Nobody looks while a whole step is replayed as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from rooftile.runtime.launch import is_capturing
from rooftile.runtime.operators import replaced


@dataclass(slots=True)
class Raised:
    """Holds a flag: int32 (1,) on a device, 1 after a weight that was not finite."""

    flag: Tensor | None = None


# the flags of compiled code, which does not know its layers
_SHARED: dict[torch.device, Raised] = {}
# by the optimiser that reads them: flags on their way to the host, the event after which they are there, and whose they are
_COPIES: WeakKeyDictionary[Any, list[tuple[Tensor, Any, list[Any]]]] = WeakKeyDictionary()
# whether there is an optimiser that reads flags
_READERS: list[bool] = []


def flag_for(w: Tensor, in_training: bool, raised: Raised | None = None) -> Tensor | None:
    """Returns the flag that stands for an error about w; None where the host looks at w itself.

    raised: that of a layer.
    """
    if not _is_later(w):
        return None
    captured = w.is_cuda and is_capturing()
    if not captured and not (in_training and _READERS):
        return None
    raised = _SHARED.setdefault(w.device, Raised()) if raised is None else raised
    if raised.flag is not None and raised.flag.device == w.device:
        return raised.flag
    with torch.inference_mode(False):
        flag = torch.zeros(1, dtype=torch.int32, device=w.device)
    # memory of a graph is the graph's alone
    if not captured:
        raised.flag = flag
    return flag


def _is_later(w: Tensor) -> bool:
    """Whether a look at w waits for other work."""
    return w.is_cuda and not replaced(w)


def read(optimizer: Any, layers: Iterable[Any]) -> None:
    """Reads the flags as they were at the optimiser's step before, and sends them out anew.

    layers: those whose weights it holds, and those that no optimiser holds.

    Raises:
        InvalidInput: a weight whose flag was raised is still not finite.
    """
    if torch.cuda.is_available() and is_capturing():
        return
    _READERS[:] = [True]
    layers = list(layers)
    suspects = [layer for copy in _COPIES.pop(optimizer, []) for layer in _landed(*copy, layers)]
    for layer in suspects:
        layer.check()
    _COPIES[optimizer] = _sent(layers)


def _landed(copy: Tensor, event: Any, owners: list[Any], layers: list[Any]) -> list[Any]:
    """The layers to look at, in the order of their names. If a flag was raised, all of them go down."""
    if event is not None:
        event.synchronize()
    found: list[Any] = []
    for at in copy.nonzero().flatten().tolist():
        owner = owners[at]
        if isinstance(owner, torch.device):
            found += (one for one in layers if one.parameter.device == owner)
        else:
            found += (one for one in layers if one is owner())
    if found:
        for raised in (*(layer.qat.raised for layer in layers), *_SHARED.values()):
            if raised.flag is not None:
                raised.flag.zero_()
    return sorted(found, key=lambda layer: layer.qat.name)


def _sent(layers: list[Any]) -> list[tuple[Tensor, Any, list[Any]]]:
    held: dict[torch.device, list[tuple[Any, Tensor]]] = {}
    # no layer lives longer for this
    found = [(ref(layer), layer.qat.raised) for layer in layers] + list(_SHARED.items())
    for owner, raised in found:
        if raised.flag is not None:
            held.setdefault(raised.flag.device, []).append((owner, raised.flag))
    return [(*_copied([flag for _, flag in each]), [owner for owner, _ in each]) for each in held.values()]


def _copied(flags: list[Tensor]) -> tuple[Tensor, Any]:
    """A copy on the host, and the event after which it is there."""
    gathered = torch.cat(flags)
    if not gathered.is_cuda:
        return gathered, None
    copy = torch.empty(len(flags), dtype=gathered.dtype, pin_memory=True)
    with torch.cuda.device(gathered.device):
        copy.copy_(gathered, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return copy, event
