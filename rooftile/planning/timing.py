"""Times layers alone, in each format, and with twice the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.hardware.clock import clock_for
from rooftile.matmul.formats import parsed
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.ops.linear import linear
from rooftile.planning.costs import Pass, passes_of
from rooftile.planning.formats import KEPT, NAMES, SPARSE, weight_in
from rooftile.planning.targets.target import Item

# time of one round: many layers are timed in many formats
BUDGET_MS = 8.0
ROUNDS = 3


class Stopwatch(Protocol):
    """Times calls."""

    def us(self, work: Callable[[], Any], passes: Sequence[Pass]) -> float:
        """Returns the time of a call in µs. passes: its kernels, for a clock that only pretends."""


class DeviceStopwatch:
    """Times calls on a device: the least of the medians of a few rounds, as others on the machine only ever lengthen one."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device, BUDGET_MS)

    def us(self, work: Callable[[], Any], passes: Sequence[Pass]) -> float:
        """Returns the time of a call in µs."""
        work()
        return min(median(self._clock.samples(work)) for _ in range(ROUNDS))


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Returns the stopwatch of a device."""
    return DeviceStopwatch(device)


def passes_for(item: Item, word: str, rows: int, *, on_gpu: bool) -> list[Pass]:
    """Returns the kernels of one call of an item in a format."""
    name, size = NAMES[item.dtype], item.dtype.itemsize
    codes = gets_codes(item, word)
    return [
        one for N, K in item.products for one in passes_of(rows, N, K, word, name, size, on_gpu=on_gpu, gets_codes=codes)
    ]


def gets_codes(item: Item, word: str) -> bool:
    """Whether the kernel before an item writes the codes that it multiplies in a format."""
    return item.takes_codes and word not in (KEPT, SPARSE) and parsed(word)[0] in ("fp8", "int8")


def products_of(item: Item, word: str) -> Callable[[Any], list[Tensor]]:
    """Returns what computes an item's products in a format, of its input (rows, K), or of that in codes."""
    weights = [w.to(item.dtype) for w in item.weights()]
    biases = [None if b is None else b.detach().to(item.dtype) for b in item.biases]
    if word == KEPT:
        return lambda x: [functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    made = [weight_in(w, word, item.name) for w in item.weights()]
    return lambda x: [linear(x, w, b) for w, b in zip(made, biases, strict=True)]


class Times:
    """Measured times of items; items of the same shape are timed once."""

    def __init__(self, stopwatch: Stopwatch, device: torch.device) -> None:
        self._stopwatch, self._device = stopwatch, device
        self._known: dict[tuple[Any, ...], float] = {}

    def of(self, item: Item, word: str, rows: Sequence[int]) -> list[float]:
        """Returns the time of one call for each number of rows, in µs."""
        shape = (item.products, gets_codes(item, word), tuple(b is None for b in item.biases), item.dtype, word)
        keys = [(*shape, one) for one in rows]
        if any(key not in self._known for key in keys):
            compute = products_of(item, word)
            for key, one in zip(keys, rows, strict=True):
                if key not in self._known:
                    self._known[key] = self._timed(item, word, one, compute)
        return [self._known[key] for key in keys]

    def of_step(self, run: Callable[[], Any], passes: Sequence[Pass]) -> float:
        """Returns the time of a whole step, in µs."""
        return self._stopwatch.us(run, passes)

    def _timed(self, item: Item, word: str, rows: int, compute: Callable[[Any], Any]) -> float:
        plain = torch.randn(rows, item.products[0][1], device=self._device).to(item.dtype)
        x: Tensor | QuantisedRows = quantise_rows(plain, parsed(word)[0]) if gets_codes(item, word) else plain
        passes = passes_for(item, word, rows, on_gpu=self._device.type == "cuda")
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return self._stopwatch.us(lambda: compute(x), passes)
