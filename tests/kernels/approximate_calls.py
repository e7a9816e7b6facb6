"""Calls of approximate attention, on little memory, that launch its kernels: the shapes of `tests/gpu` and of benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile import CAUSAL, FULL
from rooftile import approximate as ap
from rooftile.approximate.gathered import grouping as gathered_choice
from rooftile.approximate.loki import decoding as loki
from rooftile.approximate.native_sparse import decoding as native_sparse
from rooftile.approximate.native_sparse.decoding_kernels.shape import LARGEST_BYTES as DECODE_BYTES
from rooftile.approximate.native_sparse.selected import attend, block_choice
from rooftile.approximate.native_sparse.selected.attention import LARGEST_BYTES as SELECTED_BYTES
from rooftile.approximate.native_sparse.selected.attention import attend_in_pages
from rooftile.approximate.native_sparse.selected.gated_sum import gated_sum
from tests.kernels.recorded import Recorded, recorded

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# the sizes of the NSA paper: tokens of a compressed key, between two of them, and of a block; then how many blocks
SIZES = {"length": 32, "stride": 16, "block_size": 64, "count": 16, "first": 1, "local": 2}


class Call(NamedTuple):
    """A call by its name, dtype and sizes."""

    name: str
    dtype: torch.dtype
    sizes: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {' '.join(map(str, self.sizes))}"


def launches(call: Call, sm: int) -> list[Recorded]:
    """Returns the launches of a call, forward and backward, on a chip; each kind once."""
    with recorded(sm) as found:
        RUNS[call.name](call.dtype, *call.sizes)
    return list(found.values())


def _draw(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _both_ways(run: Callable[..., Tensor], *tensors: Tensor) -> None:
    run(*(x.requires_grad_() for x in tensors)).sum().backward()


def reformer(dtype: torch.dtype, H: int, Hv: int, D: int, Dv: int, rounds: int, chunk: int, mode: str) -> None:
    qk, v = _draw(dtype, 1, 700, H, D), _draw(dtype, 1, 700, Hv, Dv)
    words = {"strict": mode == "strict", "duplicates": "counted" if mode == "counted" else "once"}
    hashes = torch.arange(700, dtype=torch.int32)[None, :, None, None].expand(1, 700, H, rounds) % 8
    mask = FULL if mode == "full" else CAUSAL
    _both_ways(partial(ap.reformer, mask=mask, rounds=rounds, chunk=chunk, hashes=hashes, backend="triton", **words), qk, v)


def routing(dtype: torch.dtype, H: int, Hk: int, D: int, width: int, mask: str) -> None:
    q, k, v = (_draw(dtype, 1, n, h, D) for n, h in ((600, H), (700, Hk), (700, Hk)))
    members = tuple(torch.randint(n, (1, H, 6, width), dtype=torch.int32) for n in (600, 700))
    centroids, mask = _draw(FP32, H, 6, D), FULL if mask == "full" else CAUSAL
    _both_ways(lambda *x: ap.routing(*x, centroids, mask, members=members, backend="triton")[0], q, k, v)


def hashes(dtype: torch.dtype, D: int, rounds: int, buckets: int) -> None:
    gathered_choice.hashes(_draw(dtype, 1, 700, 2, D), _draw(FP32, 2, D, rounds, buckets // 2))


def members(dtype: torch.dtype, T: int, width: int) -> None:
    gathered_choice.best_members(_draw(dtype, 1, T, 1, 16), _draw(FP32, 1, 2, 16), width)


def selected(dtype: torch.dtype, H: int, Hk: int, D: int, Dv: int, block: int) -> None:
    T = 700
    q, k, v = (_draw(dtype, 1, T, h, dim) for h, dim in ((H, D), (Hk, D), (Hk, Dv)))
    # all choose the first block, so its list has parts
    chosen = torch.zeros(1, T, Hk, 5, dtype=torch.int32)
    _both_ways(lambda *x: attend(*x, chosen, block_size=block, scale=0.3, backend="triton")[0], q, k, v)


def in_pages(dtype: torch.dtype, H: int, Hk: int, D: int, size: int) -> None:
    k, v = (_draw(dtype, 90, 6, size, Hk, D)[:, n] for n in range(2))
    table, chosen = torch.zeros(700, dtype=torch.int32), torch.zeros(60, Hk, 16, dtype=torch.int32)
    attend_in_pages(_draw(dtype, 60, H, D), k, v, table, 700, chosen, block_size=64, scale=0.3)


def chooses(
    dtype: torch.dtype, H: int, Hk: int, D: int, has_lse: bool, length: int, stride: int, block: int, count: int
) -> None:  # fmt: skip
    q, k = _draw(dtype, 1, 100, H, D), _draw(dtype, 1, 10, Hk, D)
    assert block_choice.refusal(q, Hk, length, block, stride, count) is None
    lse = _draw(FP32, 1, H, 100) if has_lse else None
    sizes = SIZES | {"length": length, "stride": stride, "block_size": block, "count": count}
    block_choice.choose(q, k, 200, scale=0.1, lse=lse, **sizes)


def gates(dtype: torch.dtype, D: int) -> None:
    branches = [_draw(dtype, 1, 100, 4, D) for _ in range(3)]
    _both_ways(lambda *x: gated_sum(x[:3], x[3]), *branches, _draw(dtype, 1, 100, 4, 3))


def decode(dtype: torch.dtype, B: int, H: int, Hk: int, D: int, Dv: int, size: int) -> None:
    shapes = [(rows, dim) for rows in (size // SIZES["stride"], size, size) for dim in (D, Dv)]
    cache = [_draw(dtype, 4, rows, Hk, dim) for rows, dim in shapes]
    table, lengths = torch.zeros(B, 4, dtype=torch.int32), torch.full((B,), 3, dtype=torch.int32)
    pairs = zip(cache[::2], cache[1::2], strict=True)
    more = {"scale": 0.1, "window": 512, **SIZES}
    native_sparse.decode(_draw(dtype, B, H, D), _draw(dtype, B, H, 3), *pairs, table, table.clone(), lengths, **more)


def pages(dtype: torch.dtype, H: int, Hk: int, D: int, r: int, size: int) -> None:
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 3, dtype=torch.int32)
    scores = loki.page_scores(_draw(dtype, 2, H, D), _draw(dtype, 4, size, Hk, r), table, lengths, scale=0.1, softcap=None)
    loki.choose(scores, lengths, size=size, keep=0.5)


RUNS: dict[str, Callable[..., None]] = {
    run.__name__: run for run in (reformer, routing, hashes, members, selected, in_pages, chooses, gates, decode, pages)
}
DTYPES = (FP32, BF16, FP16)
PAPER = (32, 16, 64, 16)
CALLS = [
    *(
        Call("reformer", dtype, (*heads, *rounds, mode))
        for dtype, heads, rounds, mode in product(
            DTYPES, ((4, 4, 128, 128), (4, 1, 64, 64), (2, 1, 40, 24)), ((2, 128), (3, 50), (1, 64)),
            ("causal", "full", "strict", "counted"),
        )
    ),
    *(
        Call("routing", dtype, (*heads, width, mask))
        for dtype, heads, width, mask in product(
            DTYPES, ((4, 4, 128), (4, 1, 64), (2, 1, 40)), (50, 256, 1024), ("causal", "full")
        )
    ),
    *(Call("hashes", dtype, sizes) for dtype in DTYPES for sizes in ((128, 2, 128), (64, 3, 8), (40, 1, 1024))),
    *(Call("members", BF16, sizes) for sizes in ((600, 50), (700, 256), (4096, 64), (16384, 256), (32768, 512))),
    *(
        Call("selected", dtype, (*heads, 64))
        for dtype in DTYPES
        for heads in (
            (16, 1, 128, 128), (32, 8, 64, 64), (10, 2, 64, 64), (16, 1, 192, 128), (64, 4, 128, 128), (32, 8, 128, 128),
        )
    ),
    *(Call("selected", dtype, (4, 1, 128, 128, block)) for dtype in DTYPES for block in (16, 32, 48, 128)),
    *(Call("in_pages", dtype, (*heads, size)) for dtype in DTYPES for heads in ((16, 1, 128), (32, 8, 64)) for size in (16, 48)),
    *(
        Call("chooses", dtype, (H, Hk, D, has_lse, *sizes))
        for dtype, (H, Hk, D), has_lse, sizes in product(
            DTYPES, ((16, 1, 128), (32, 8, 64), (10, 2, 64), (16, 1, 192), (16, 2, 64)), (False, True), (PAPER, (32, 16, 64, 6))
        )
    ),
    *(Call("gates", dtype, (D,)) for dtype in DTYPES for D in (40, 64, 128)),
    *(
        Call("decode", dtype, sizes)
        for dtype in DTYPES
        for sizes in (
            (5, 64, 4, 128, 128, 16), (5, 10, 2, 64, 64, 32), (5, 16, 1, 192, 128, 16), (32, 64, 4, 128, 128, 16),
            (1, 32, 8, 128, 128, 16),
        )
    ),
    *(Call("pages", dtype, sizes) for dtype in DTYPES for sizes in ((32, 8, 128, 32, 16), (4, 2, 64, 16, 64), (3, 3, 40, 10, 8))),
]  # fmt: skip
# every head dim and group that the calls admit, in each dtype
WIDE = [
    *(
        Call("chooses", dtype, (2 * G, 2, D, False, *sizes))
        for dtype, D, G, sizes in product(
            (FP32, BF16), (16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64, 128), (PAPER, (16, 16, 16, 64), (16, 2, 40, 16))
        )
        if dtype == FP32 or G * D <= 16384
    ),
    # gradients of heads of 256, and larger groups, run partly from the stack
    *(
        Call("selected", dtype, (G, 1, D, D, block))
        for dtype, D, G, block in product((FP32, BF16), (16, 32, 64, 128), (1, 4, 16, 32, 64, 128), (16, 64))
        if G * 2 * D * dtype.itemsize <= SELECTED_BYTES // 2
    ),
    *(
        Call("decode", dtype, (1, 2 * G, 2, D, D, 16))
        for dtype, D, G in product((FP32, BF16), (16, 64, 128, 256), (1, 16, 32, 64, 128))
        if G * 2 * D * dtype.itemsize <= DECODE_BYTES // 2
    ),
]
