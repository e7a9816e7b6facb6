"""Times layers alone, in each format, and with twice the rows, and knows whether the ceilings agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.hardware import ceilings
from rooftile.hardware.clock import ReplayClock, clock_for
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.planning.costs import DeviceCeilings, Pass, passes_of, training_passes_of
from rooftile.planning.formats import KEPT, NAMES, weight_bytes
from rooftile.planning.targets.target import Item
from rooftile.qat.rounding.codes import Rounding, taken_from
from rooftile.qat.rounding.product import linear as rounded_linear
from rooftile.runtime.early_weights import weights_stay
from rooftile.weights.files.formats import SPARSE, weight_in
from rooftile.weights.formats import parsed
from rooftile.weights.linear import linear
from rooftile.weights.two_four.product.dispatch import last_of_ours

# time of one round: many layers are timed in many formats
BUDGET_MS = 8.0
ROUNDS = 3
# a call that takes this long, and is this many times as fast as its roofs, shows that they were measured too low
LONG_US, ABOVE = 1e3, 1.2
# the phase that a server replays as CUDA graphs
REPLAYED = "decode"
# size of the copies of a layer's weights that a graph walks through, in L2 caches, so that none is found there
CACHES = 4
# devices whose ceilings this process has measured a second time
_measured_again: set[torch.device] = set()


class Size(NamedTuple):
    """The rows of a call, and whether it is part of a CUDA graph."""

    rows: int
    replayed: bool = False


class TimedCalls(NamedTuple):
    """Calls that take the same time, one for each copy of the weights, and the kernels of one call, for a simulated clock.

    replayed: whether the time is the time in a CUDA graph. There is one call if not.
    """

    runs: Sequence[Callable[[], Any]]
    passes: Sequence[Pass]
    replayed: bool = False


class Stopwatch(Protocol):
    """Times calls."""

    def us(self, works: Sequence[TimedCalls]) -> list[float]:
        """Returns the time of each call in µs."""


class DeviceStopwatch:
    """Times calls on a device: the least of the medians of a few rounds, as others on the machine only ever lengthen one.

    A single call is timed with a cold L2 cache. In a graph, calls follow each other as in a server's step, and products
    begin while the one in front of them ends. A short product then takes far less time than a single call.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device, BUDGET_MS)

    def us(self, works: Sequence[TimedCalls]) -> list[float]:
        """Returns the time of one call of each in µs. They take turns, so that their ratios are of the same minute."""
        clocks = [ReplayClock() if work.replayed else self._clock for work in works]
        calls = [partial(_one_after_the_other, work.runs) for work in works]
        for call in calls:
            call()
        # an engine's graphs let weights be copied early, too
        with weights_stay():
            rounds = [[median(clock.samples(call)) for clock, call in zip(clocks, calls, strict=True)] for _ in range(ROUNDS)]
        return [min(taken) / len(work.runs) for work, *taken in zip(works, *rounds, strict=True)]


def _one_after_the_other(runs: Sequence[Callable[[], Any]]) -> None:
    for run in runs:
        run()


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Returns the stopwatch of a device."""
    return DeviceStopwatch(device)


def cache_bytes_of(device: torch.device) -> int:
    """Returns the size of a GPU's L2 cache; 0 where it is unknown, and for a CPU, which has no graphs."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if device.type == "cuda" else 0


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


def sizes_of(item: Item) -> list[Size]:
    """Returns the sizes of an item's calls."""
    return [Size(load.rows, load.phase == REPLAYED) for load in item.loads]


def with_doubled(sizes: Sequence[Size]) -> list[Size]:
    """Returns sizes, and then the sizes with twice the rows."""
    return [*sizes, *(size._replace(rows=2 * size.rows) for size in sizes)]


def gets_codes(item: Item, word: str) -> bool:
    """Whether the kernel before an item writes the codes that it multiplies in a format."""
    return item.takes_codes and word not in (KEPT, SPARSE) and parsed(word)[0] in ("fp8", "int8")


def products_of(item: Item, word: str, *, copied: bool = False) -> Callable[[Any], list[Tensor]]:
    """Returns what computes an item's products in a format, of its input (rows, K), or of that in codes.

    copied: whether its weights are copies, where they would be the item's own.
    """
    weights = [w.to(item.dtype, copy=copied) for w in item.weights()]
    biases = [None if b is None else b.detach().to(item.dtype) for b in item.biases]
    if word == KEPT:
        return lambda x: [functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
    made = [weight_in(w, word, item.name) for w in item.weights()]
    return lambda x: [linear(x, w, b) for w, b in zip(made, biases, strict=True)]


def training_of(item: Item, word: str) -> Callable[[Any], list[Tensor]]:
    """Returns what computes an item's products in a format and their gradients, as a prepared layer does.

    In training the host does not wait for a look at a weight (`qat.finite`), so it does not here either.
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
                wanted = [tensor for tensor in (x if item.needs_dx else None, w, b) if tensor is not None]
                # any numbers do for the gradient of y
                found += torch.autograd.grad(y, wanted, y.detach())
        return found

    return compute


class Times:
    """Measured times of items; items of the same shape are timed once."""

    def __init__(self, stopwatch: Stopwatch, device: torch.device) -> None:
        self._stopwatch, self._device = stopwatch, device
        self._known: dict[tuple[Any, ...], float] = {}
        self._cache_bytes = cache_bytes_of(device)

    def take(self, item: Item, sizes: Mapping[str, Sequence[Size]]) -> None:
        """Times an item in several formats, each in some sizes, so that all of them take turns."""
        works: dict[tuple[Any, ...], TimedCalls] = {}
        for word, wanted in sizes.items():
            missing = [size for size in dict.fromkeys(wanted) if self._key(item, word, size) not in self._known]
            for replayed in dict.fromkeys(size.replayed for size in missing):
                computes = self._computes(item, word, replayed)
                works |= {
                    self._key(item, word, size): self._work(item, word, size, computes)
                    for size in missing if size.replayed == replayed
                }  # fmt: skip
        if works:
            with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
                times = self._stopwatch.us(list(works.values()))
            self._known |= dict(zip(works, times, strict=True))

    def of(self, item: Item, word: str, sizes: Sequence[Size]) -> list[float]:
        """Returns the time of one call of each size, in µs."""
        self.take(item, {word: sizes})
        return [self._known[self._key(item, word, size)] for size in sizes]

    def of_step(self, run: Callable[[], Any], passes: Sequence[Pass], *, replayed: bool) -> float:
        """Returns the time of a whole step, in µs."""
        (found,) = self._stopwatch.us([TimedCalls([run], passes, self._device.type == "cuda" and replayed)])
        return found

    def _key(self, item: Item, word: str, size: Size) -> tuple[Any, ...]:
        biases = tuple(b is None for b in item.biases)
        return item.products, item.trains, item.needs_dx, gets_codes(item, word), biases, item.dtype, word, size

    def _computes(self, item: Item, word: str, replayed: bool) -> list[Callable[[Any], Any]]:
        """Returns what computes an item, for each copy of its weights."""
        if item.trains:
            return [training_of(item, word)]
        nbytes = sum(weight_bytes(N, K, word, item.dtype.itemsize) for N, K in item.products)
        copies = max(ceil(CACHES * self._cache_bytes / nbytes), 1) if replayed else 1
        return [products_of(item, word, copied=copies > 1) for _ in range(copies)]

    def _work(self, item: Item, word: str, size: Size, computes: Sequence[Callable[[Any], Any]]) -> TimedCalls:
        plain = torch.randn(size.rows, item.products[0][1], device=self._device).to(item.dtype)
        x: Tensor | QuantisedRows = quantise_rows(plain, parsed(word)[0]) if gets_codes(item, word) else plain
        runs = [partial(compute, x) for compute in computes]
        return TimedCalls(runs, passes_for(item, word, size.rows, self._device), self._device.type == "cuda" and size.replayed)


def machine_for(device: torch.device, items: Sequence[Item], times: Times | None) -> DeviceCeilings:
    """Returns a device with its ceilings; they are measured again, once, if a layer is clearly faster than they allow."""
    machine = DeviceCeilings(device, ceilings.measure(device))
    if times is None or device in _measured_again or not any(_is_above(item, machine, times) for item in items):
        return machine
    _measured_again.add(device)
    return DeviceCeilings(device, ceilings.measure_again(device))


def _is_above(item: Item, machine: DeviceCeilings, times: Times) -> bool:
    """Whether a call that takes a while is faster than the roofs, which were measured on a busy machine then."""
    sizes = sizes_of(item)
    predicted = [machine.us(passes_for(item, KEPT, size.rows, machine.device)) for size in sizes]
    return any(us > LONG_US and roof > ABOVE * us for us, roof in zip(times.of(item, KEPT, sizes), predicted, strict=True))
