"""Measures tiles and numbers of programs of Hopper's quantised products, for the table in `rooftile.weights.hopper.launch`.

    python -m rooftile_lab.programs.products [--formats fp8,int4] [--rows 1,16,64,256] [--out variants.jsonl]

The products are the four of an 8B model's layer, each over more layers than the L2 cache holds, as a CUDA graph. A variant is
timed only if its results agree with the definition by the mean of their differences. Lines are sorted by time, the
fastest first; `of_bf16_ratio` is a time over the time of cuBLAS in bf16. Some are printed, and all are written to the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import rooftile as rt
from rooftile.hardware.clock import ReplayClock, medians
from rooftile.numerics import QuantisedRows, quantise_rows
from rooftile.weights import QuantisedWeight, weight_format
from rooftile.weights.definition import Product
from rooftile.weights.hopper import launch
from rooftile.weights.hopper.early import weights_stay
from rooftile.weights.hopper.ordered import in_order
from rooftile.weights.hopper.schedule import WARPGROUPS, ProductTile

PRODUCTS = {"qkv": (6144, 4096), "o": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336)}
# bytes of weights that a variant walks through: several times the L2 cache
WALKED = 400 << 20
MOST_ERROR = 0.02
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

    def start(self, tile: ProductTile, programs: int, ordered: bool, weight: QuantisedWeight) -> Tensor:
        if self.rows is not None:
            launch.start_codes(tile, programs, self.rows.codes, self.rows.scales, weight.parts, None, self.product, self.o)
            return self.o
        # putting x in order is part of the product
        x = in_order(self.x, "bytes" if weight_format(weight.format).bits == 8 else "nibbles") if ordered else self.x
        launch.start_widened(tile, programs, x, ordered, weight.parts, None, self.product, self.o)
        return self.o

    def error(self, tile: ProductTile, programs: int, ordered: bool) -> float:
        self.o.fill_(torch.nan)
        found = self.start(tile, programs, ordered, self.weights[0]).float()
        return float((found - self.due.float()).abs().mean() / self.due.float().abs().mean())

    def all_layers(self, tile: ProductTile, programs: int, ordered: bool) -> None:
        for weight in self.weights:
            self.start(tile, programs, ordered, weight)

    def in_16_bits(self) -> None:
        for w in self.plain:
            functional.linear(self.x, w)


def measure(format: str, name: str, M: int) -> Iterator[dict[str, Any]]:
    """Yields a line for each variant of a product, and one for each that is wrong or does not run."""
    N, K = PRODUCTS[name]
    layers = Layers(format, N, K, M, max(WALKED // (N * K * weight_format(format).bits // 8), 2))
    processors = launch.processors_of(layers.x.device)
    about = {"format": format, "product": name, "rows": M, "device": torch.cuda.get_device_name()}
    works: dict[Any, Any] = {None: layers.in_16_bits}
    for tile, ordered in variants(M, format):
        for programs in programs_for(tile, M, N, K, processors):
            line = about | {"tile": tile._asdict(), "programs": programs, "ordered": ordered}
            try:
                error = layers.error(tile, programs, ordered)
            # a variant may ask for more than the chip has, and says so
            except Exception as stopped:
                yield line | {"reason": f"{type(stopped).__name__}: {str(stopped)[:200]}"}
                continue
            if not error <= MOST_ERROR:
                yield line | {"reason": f"its error is {error:.1%} of what is due"}
                continue
            works[tile, programs, ordered] = partial(layers.all_layers, tile, programs, ordered)
    # an engine's graphs let weights be copied early, too
    with weights_stay():
        us = medians(works, ReplayClock())
    own = launch.tile_of(M, N, K, format, False, processors)
    table = (own, launch._programs(own, layers.x, layers.product), not launch.orders_itself(M, N, K, processors))
    for key in sorted(us, key=lambda key: us[key]):
        if key is not None:
            tile, programs, ordered = key
            yield about | {
                "tile": tile._asdict(), "programs": programs, "ordered": ordered, "us": round(us[key] / len(layers.plain), 3),
                "of_bf16_ratio": round(us[key] / us[None], 4), "chosen": key == table,
            }  # fmt: skip


def compile_all(formats: list[str], rows: list[int]) -> None:
    """Compiles each kernel once, several at a time: the compiler spends most of its time outside Python."""

    @torch.inference_mode()
    def compiled(layers: Layers, tile: ProductTile, ordered: bool) -> None:
        layers.error(tile, 4, ordered)

    jobs = []
    for format in formats:
        for M in rows:
            layers = Layers(format, 512, 512, M, 1)
            jobs += [(layers, *variant) for variant in variants(M, format)]
    # threads that import or initialise the same thing at once can fail
    compiled(*jobs.pop())
    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(compiled, *job) for job in jobs]:
            if done.exception() is not None:
                print(f"# {done.exception()}")


@torch.inference_mode()
def main() -> None:
    """Runs the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="fp8,int4")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--out")
    asked = parser.parse_args()
    formats, rows = asked.formats.split(","), [int(M) for M in asked.rows.split(",")]
    compile_all(formats, rows)
    found = []
    for format in formats:
        for M in rows:
            for name in asked.products.split(","):
                lines = list(measure(format, name, M))
                found += lines
                timed = [each for each in lines if "us" in each]
                shown = [each for each in lines if "us" not in each] + timed[:3] + [each for each in timed[3:] if each["chosen"]]
                for line in shown:
                    print(json.dumps(line), flush=True)
    if asked.out:
        with open(asked.out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in found)


if __name__ == "__main__":
    main()
