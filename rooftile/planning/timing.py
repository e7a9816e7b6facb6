"""Times layers alone, in each format, and with twice the rows, and knows whether the ceilings agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.hardware import ceilings
from rooftile.hardware.clock import clock_for
from rooftile.matmul.formats import parsed
from rooftile.matmul.two_four.backends import last_of_ours
from rooftile.models.checkpoints.formats import SPARSE, weight_in
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.ops.linear import linear
from rooftile.planning.costs import Machine, Pass, passes_of, training_passes_of
from rooftile.planning.formats import KEPT, NAMES
from rooftile.planning.targets.target import Item
from rooftile.qat.codes import taken_from
from rooftile.qat.product import Rounding
from rooftile.qat.product import linear as rounded_linear

# time of one round: many layers are timed in many formats
BUDGET_MS = 8.0
ROUNDS = 3
# a call that takes so long, and is so many times as fast as its roofs, shows that they were measured too low
LONG_US, ABOVE = 1e3, 1.2
# devices whose ceilings this process has measured a second time
_measured_again: set[torch.device] = set()


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


def passes_for(item: Item, word: str, rows: int, device: torch.device) -> list[Pass]:
    """Returns the kernels of one call of an item in a format on a device."""
    name, size, on_gpu = NAMES[item.dtype], item.dtype.itemsize, device.type == "cuda"
    if item.trains:
        return [
            one
            for (N, K), bias in zip(item.products, item.biases, strict=True)
            for one in training_passes_of(
                rows, N, K, word, name, size, on_gpu=on_gpu, needs_dx=item.needs_dx, has_bias=bias is not None
            )
        ]  # fmt: skip
    codes, few = gets_codes(item, word), last_of_ours(device) if on_gpu else 0
    return [
        one
        for N, K in item.products
        for one in passes_of(rows, N, K, word, name, size, on_gpu=on_gpu, gets_codes=codes, few=few)
    ]  # fmt: skip


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
    """Returns what computes an item's products in a format and their gradients, as a prepared layer does.

    In training nobody waits for a look at a weight (`qat.finite`), so here nobody does either.
    """
    weights = [w.to(item.dtype).requires_grad_() for w in item.weights()]
    biases = [None if b is None else b.detach().to(item.dtype).requires_grad_() for b in item.biases]
    rounding = None if word == KEPT else Rounding(*parsed(word), "straight")
    flag = torch.zeros(1, dtype=torch.int32, device=weights[0].device) if weights[0].is_cuda else None

    def rounded(x: Tensor, w: Tensor, b: Tensor | None, rounding: Rounding) -> Tensor:
        return rounded_linear(x, w, b, rounding, taken_from(w, rounding, flag=flag))

    def compute(x: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        with torch.enable_grad():
            x = x.detach().requires_grad_(item.needs_dx)
            for w, b in zip(weights, biases, strict=True):
                y = functional.linear(x, w, b) if rounding is None else rounded(x, w, b, rounding)
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

    def take(self, item: Item, rows: Mapping[str, Sequence[int]]) -> None:
        """Times an item in several formats, each with some numbers of rows, so that all of them take turns."""
        works: dict[tuple[Any, ...], Timed] = {}
        for word, counts in rows.items():
            missing = [one for one in dict.fromkeys(counts) if self._key(item, word, one) not in self._known]
            if missing:
                compute = (training_of if item.trains else products_of)(item, word)
                works |= {self._key(item, word, one): self._work(item, word, one, compute) for one in missing}
        if works:
            with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
                times = self._stopwatch.us(list(works.values()))
            self._known |= dict(zip(works, times, strict=True))

    def of(self, item: Item, word: str, rows: Sequence[int]) -> list[float]:
        """Returns the time of one call for each number of rows, in µs."""
        self.take(item, {word: rows})
        return [self._known[self._key(item, word, one)] for one in rows]

    def of_step(self, run: Callable[[], Any], passes: Sequence[Pass]) -> float:
        """Returns the time of a whole step, in µs."""
        (found,) = self._stopwatch.us([Timed(run, passes)])
        return found

    def _key(self, item: Item, word: str, rows: int) -> tuple[Any, ...]:
        biases = tuple(b is None for b in item.biases)
        return item.products, item.trains, item.needs_dx, gets_codes(item, word), biases, item.dtype, word, rows

    def _work(self, item: Item, word: str, rows: int, compute: Callable[[Any], Any]) -> Timed:
        plain = torch.randn(rows, item.products[0][1], device=self._device).to(item.dtype)
        x: Tensor | QuantisedRows = quantise_rows(plain, parsed(word)[0]) if gets_codes(item, word) else plain
        return Timed(lambda: compute(x), passes_for(item, word, rows, self._device))


def machine_for(device: torch.device, items: Sequence[Item], times: Times | None) -> Machine:
    """Returns a device with its ceilings; they are measured again, once, if a layer is clearly faster than they allow."""
    machine = Machine(device, ceilings.measure(device))
    if times is None or device in _measured_again or not any(_is_above(item, machine, times) for item in items):
        return machine
    _measured_again.add(device)
    return Machine(device, ceilings.measure_again(device))


def _is_above(item: Item, machine: Machine, times: Times) -> bool:
    """Whether a call that takes a while is faster than the roofs, which were measured on a busy machine then."""
    rows = [load.rows for load in item.loads]
    predicted = [machine.us(passes_for(item, KEPT, one, machine.device)) for one in rows]
    return any(
        us > LONG_US and roof > ABOVE * us for us, roof in zip(times.of(item, KEPT, rows), predicted, strict=True)
    )
