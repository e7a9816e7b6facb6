"""Times layers alone, in each format, and with twice the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.hardware.clock import clock_for
from rooftile.matmul.formats import parsed
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.ops.linear import linear
from rooftile.planning.costs import Pass, passes_of, training_passes_of
from rooftile.planning.formats import KEPT, NAMES, SPARSE, weight_in
from rooftile.planning.targets.target import Item
from rooftile.qat.product import Rounding
from rooftile.qat.product import linear as rounded_linear

# time of one round: many layers are timed in many formats
BUDGET_MS = 8.0
ROUNDS = 3


class Timed(NamedTuple):
    """A call, and its kernels, for a clock that only pretends."""

    run: Callable[[], Any]
    passes: Sequence[Pass]


class Stopwatch(Protocol):
    """Times calls."""

    def us(self, works: Sequence[Timed]) -> list[float]:
        """Returns the time of each call in µs."""


class DeviceStopwatch:
    """Times calls on a device: the least of the medians of a few rounds, as others on the machine only ever lengthen one."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device, BUDGET_MS)

    def us(self, works: Sequence[Timed]) -> list[float]:
        """Returns the time of each call in µs. They take turns, so that their ratios are of the same minute."""
        for work in works:
            work.run()
        rounds = [[median(self._clock.samples(work.run)) for work in works] for _ in range(ROUNDS)]
        return [min(taken) for taken in zip(*rounds, strict=True)]


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Returns the stopwatch of a device."""
    return DeviceStopwatch(device)


def passes_for(item: Item, word: str, rows: int, *, on_gpu: bool) -> list[Pass]:
    """Returns the kernels of one call of an item in a format."""
    name, size = NAMES[item.dtype], item.dtype.itemsize
    if item.trains:
        return [
            one
            for (N, K), bias in zip(item.products, item.biases, strict=True)
            for one in training_passes_of(
                rows, N, K, word, name, size, on_gpu=on_gpu, needs_dx=item.needs_dx, has_bias=bias is not None
            )
        ]  # fmt: skip
    codes = gets_codes(item, word)
    return [
        one for N, K in item.products for one in passes_of(rows, N, K, word, name, size, on_gpu=on_gpu, gets_codes=codes)
    ]


def with_doubled(rows: Sequence[int]) -> list[int]:
    """Returns numbers of rows, and then twice as many of each."""
    return [*rows, *(2 * one for one in rows)]


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


def training_of(item: Item, word: str) -> Callable[[Any], list[Tensor]]:
    """Returns what computes an item's products in a format and their gradients, as a prepared layer does."""
    weights = [w.to(item.dtype).requires_grad_() for w in item.weights()]
    biases = [None if b is None else b.detach().to(item.dtype).requires_grad_() for b in item.biases]
    rounding = None if word == KEPT else Rounding(*parsed(word), "straight")

    def compute(x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        with torch.enable_grad():
            x = x.detach().requires_grad_(item.needs_dx)
            for w, b in zip(weights, biases, strict=True):
                y = functional.linear(x, w, b) if rounding is None else rounded_linear(x, w, b, rounding)
                asked = [tensor for tensor in (x if item.needs_dx else None, w, b) if tensor is not None]
                # any numbers do for the gradient of y
                found += torch.autograd.grad(y, asked, y.detach())
        return found

    return compute


class Times:
    """Measured times of items; items of the same shape are timed once."""

    def __init__(self, stopwatch: Stopwatch, device: torch.device) -> None:
        self._stopwatch, self._device = stopwatch, device
        self._known: dict[tuple[Any, ...], float] = {}

    def of(self, item: Item, word: str, rows: Sequence[int]) -> list[float]:
        """Returns the time of one call for each number of rows, in µs."""
        codes, biases = gets_codes(item, word), tuple(b is None for b in item.biases)
        shape = (item.products, item.trains, item.needs_dx, codes, biases, item.dtype, word)
        missing = [one for one in dict.fromkeys(rows) if (*shape, one) not in self._known]
        if missing:
            compute = (training_of if item.trains else products_of)(item, word)
            works = [self._work(item, word, one, compute) for one in missing]
            with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
                times = self._stopwatch.us(works)
            self._known |= {(*shape, one): us for one, us in zip(missing, times, strict=True)}
        return [self._known[*shape, one] for one in rows]

    def of_step(self, run: Callable[[], Any], passes: Sequence[Pass]) -> float:
        """Returns the time of a whole step, in µs."""
        (found,) = self._stopwatch.us([Timed(run, passes)])
        return found

    def _work(self, item: Item, word: str, rows: int, compute: Callable[[Any], Any]) -> Timed:
        plain = torch.randn(rows, item.products[0][1], device=self._device).to(item.dtype)
        x: Tensor | QuantisedRows = quantise_rows(plain, parsed(word)[0]) if gets_codes(item, word) else plain
        return Timed(lambda: compute(x), passes_for(item, word, rows, on_gpu=self._device.type == "cuda"))
