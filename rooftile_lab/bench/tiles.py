"""Tiles and numbers of programs of Hopper's quantised products, for the table in `rooftile.weights.hopper.launch`.

The products are the four of an 8B model's layer, each over more layers than the L2 cache holds, as a CUDA graph; a time is one
layer's. A variant is timed only if its results agree with the definition by the mean of their differences. Rows are sorted by
time, the fastest first; `of_bf16_ratio` is a time over the time of cuBLAS in bf16, and `chosen` is the variant that a call takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import rooftile as rt
from rooftile.cost.session import Session
from rooftile.hardware.clock import ReplayClock, Work, take_turns
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.runtime.early_weights import weights_stay
from rooftile.weights import QuantisedWeight, weight_format
from rooftile.weights.definition import Product
from rooftile.weights.hopper import launch
from rooftile.weights.hopper.ordered import in_order
from rooftile.weights.hopper.schedule import WARPGROUPS, ProductTile
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.suites import linear
from rooftile_lab.bench.works import words_of_error

PRODUCTS = dict(zip(("qkv", "o", "up", "down"), linear.PRODUCTS, strict=True))
# bytes of weights that a variant walks through: several times the L2 cache
WALKED = 400 << 20
DEVICE = "cuda"
# rows of x that a warpgroup can put in order by itself
MOST_ORDERED = 64


def tiles_for(M: int, format: str) -> Iterator[ProductTile]:
    """Yields tiles whose rings fit into shared memory, with all stages that fit and with fewer."""
    columns = min(max(1 << (M - 1).bit_length(), 8), 128)
    kind = weight_format(format)
    shapes = [(1, columns, 1), (2, columns, 1)]
    if kind.activations is None and M > 128:
        shapes.append((1, 256, 1))
    if kind.activations is not None and format != "fp8_tile":
        shapes += [(1, columns, 2)] if columns < M else []
        shapes += [(2, columns // 2, 1), (1, columns // 2, 2)] if columns >= 64 else []
    for blocks_n, columns_, blocks_m in shapes:
        tile = ProductTile(blocks_n, columns_, blocks_m, 0)
        if kind.activations is None:
            held = WARPGROUPS * tile.block_m * 256 if M <= MOST_ORDERED else 0
            stage = tile.block_n * 16 * kind.bits + tile.block_m * 256
        else:
            held, stage = 0, (tile.block_n + tile.block_m) * 128
        most = min((launch.SHARED - held) // stage, launch.MOST_STAGES)
        for stages in sorted({most, most // 2}, reverse=True):
            if stages >= 2:
                yield tile._replace(STAGES=stages)


def variants(M: int, format: str) -> Iterator[tuple[ProductTile, bool]]:
    """Yields tiles, each with whether x is put in order by a kernel before."""
    orders = (False, True) if weight_format(format).activations is None and M <= MOST_ORDERED else (True,)
    yield from product(tiles_for(M, format), orders)


def programs_for(tile: ProductTile, M: int, N: int, K: int, processors: int) -> list[int]:
    """Returns numbers of programs: those that are chosen, all multiprocessors, and whole tiles or shares of one."""
    sizes = launch.sizes_of(tile, M, N, K, False)
    found = {launch.programs_of(sizes, processors, M, is_codes=is_codes) for is_codes in (False, True)}
    found |= {min(processors, sizes.tiles * sizes.steps // 2), min(processors, sizes.tiles), min(processors, 2 * sizes.tiles)}
    return sorted(found - {0})


class Variant(NamedTuple):
    """A tile, the number of programs, and whether x is put in order by a kernel before."""

    tile: ProductTile
    programs: int
    ordered: bool

    def __str__(self) -> str:
        blocks_n, columns, blocks_m, stages = self.tile
        order = ", ordered before" if self.ordered else ""
        return f"{blocks_n}x{columns}x{blocks_m}, {stages} stages, {self.programs} programs{order}"


class Layers:
    """Weights and inputs of one product over several layers."""

    def __init__(self, format: str, N: int, K: int, M: int, count: int) -> None:
        self.plain = [torch.randn(N, K, device=DEVICE).bfloat16() * 0.02 for _ in range(count)]
        self.weights = [rt.quantise_weight(w, format) for w in self.plain]
        self.product = Product(format, self.weights[0].group, N, K, torch.bfloat16, False)
        self.x = torch.randn(M, K, device=DEVICE).bfloat16()
        codes = weight_format(format).activations
        self.rows: QuantisedRows | None = quantise_rows(self.x, codes) if codes else None
        self.o = torch.empty(M, N, dtype=torch.bfloat16, device=DEVICE)
        self.due = rt.linear(self.x, self.weights[0], backend="definition")

    def start(self, variant: Variant, weight: QuantisedWeight) -> Tensor:
        """Multiplies by one layer's weight."""
        tile, programs, ordered = variant
        if self.rows is not None:
            launch.start_codes(tile, programs, self.rows.codes, self.rows.scales, weight.parts, None, self.product, self.o)
            return self.o
        # putting x in order is part of the product
        x = in_order(self.x, "bytes" if weight_format(weight.format).bits == 8 else "nibbles") if ordered else self.x
        launch.start_widened(tile, programs, x, ordered, weight.parts, None, self.product, self.o)
        return self.o

    def error(self, variant: Variant) -> float:
        """Returns the mean difference from the definition over the mean of what is due."""
        self.o.fill_(torch.nan)
        found = self.start(variant, self.weights[0]).float()
        return float((found - self.due.float()).abs().mean() / self.due.float().abs().mean())

    def all_layers(self, variant: Variant) -> None:
        """Multiplies by the weights of all layers."""
        for weight in self.weights:
            self.start(variant, weight)

    def in_16_bits(self) -> None:
        """Multiplies by the weights of all layers before they are quantised."""
        for w in self.plain:
            functional.linear(self.x, w)


def measure(
    session: Session, formats: Sequence[str], rows: Sequence[int], products: Sequence[str], say: Progress
) -> Iterator[Row]:
    """Yields the rows of all products."""
    say("compiling")
    compile_all(formats, rows, say)
    for format, M, name in product(formats, rows, products):
        say(f"{format}, {M} rows, {name}")
        with torch.inference_mode():
            found = list(variants_of(session, format, name, M))
        yield from found


def variants_of(session: Session, format: str, name: str, M: int) -> Iterator[Row]:
    """Yields a row for each variant of a product, and one with a reason for each that is wrong or does not run."""
    N, K = PRODUCTS[name]
    layers = Layers(format, N, K, M, max(WALKED // (N * K * weight_format(format).bits // 8), 2))
    processors = launch.processors_of(layers.x.device)
    own = launch.tile_of(M, N, K, format, False, processors)
    chosen = Variant(own, launch._programs(own, layers.x, layers.product), not launch.orders_itself(M, N, K, processors))
    named: dict[str, Any] = {"suite": "tiles", "case": f"8b-{format}-{name}-r{M}", "phase": "fwd"}
    works: dict[Variant | None, Work] = {None: layers.in_16_bits}
    for tile, ordered in variants(M, format):
        for programs in programs_for(tile, M, N, K, processors):
            one = Variant(tile, programs, ordered)
            if reason := complaint(layers, one):
                yield timed_row(session, [], backend=str(one), reason=reason, **named)
            else:
                works[one] = partial(layers.all_layers, one)
    # an engine's graphs let weights be copied early, too
    with weights_stay():
        taken = take_turns(works, ReplayClock())
    us = {one: median(samples) for one, samples in taken.items()}
    for timed in sorted((one for one in works if one is not None), key=lambda one: us[one]):
        a_layer = [sample / len(layers.plain) for sample in taken[timed]]
        settings = timed.tile._asdict() | {"programs": timed.programs, "ordered": timed.ordered, "chosen": timed == chosen}
        row = timed_row(session, a_layer, backend=str(timed), settings=settings, **named)
        yield with_measures(row, of_bf16_ratio=us[timed] / us[None])


def complaint(layers: Layers, variant: Variant) -> str:
    """Returns why a variant must not be timed; "" if it may."""
    try:
        error = layers.error(variant)
    # a variant may ask for more than the chip has, and says so
    except Exception as stopped:
        return f"failed: {words_of_error(stopped)}"
    return "" if error <= linear.MOST_ERROR else f"wrong: its error is {error:.1%} of what is due"


def compile_all(formats: Sequence[str], rows: Sequence[int], say: Progress) -> None:
    """Compiles each kernel once, several at a time: the compiler spends most of its time outside Python."""

    @torch.inference_mode()
    def compiled(layers: Layers, tile: ProductTile, ordered: bool) -> None:
        layers.error(Variant(tile, 4, ordered))

    jobs: list[tuple[Layers, ProductTile, bool]] = []
    for format in formats:
        for M in rows:
            layers = Layers(format, 512, 512, M, 1)
            jobs += [(layers, *variant) for variant in variants(M, format)]
    # threads that import or initialise the same thing at once can fail
    compiled(*jobs.pop())
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(compiled, *job) for job in jobs]:
            if done.exception() is not None:
                say(str(done.exception()))
