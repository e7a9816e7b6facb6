"""Starts the forward: its outputs and its launch, which dense, packed and paged calls plan alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact.backends.hopper.bias import are_prepared, bias_descriptor, bias_kind, bias_shape, contiguous, readable_bias
from rooftile.exact.backends.hopper.counters import counter
from rooftile.exact.backends.hopper.flash_fwd import kernel
from rooftile.exact.backends.hopper.plan import flags_of, numbers_of, processors, rows_shape, schedule, sizes_of, tiles_and_heads
from rooftile.exact.backends.hopper.tiles import (
    WARPGROUP,
    BiasKind,
    Flags,
    ForwardTile,
    biased_tile,
    forward_tile,
    listed_tile,
    padded,
    paged_tile,
)
from rooftile.exact.backends.hopper.tma import (
    are_readable,
    box_of_pages,
    descriptor,
    is_readable,
    of_pages,
    readable,
    steps_of_pages,
)
from rooftile.exact.backends.paged_by_gather import as_packed
from rooftile.exact.blocks.lists import steps_of_lists
from rooftile.exact.spec import Options, Sizes, Spec, output_dtype
from rooftile.kvcache import PagedKV
from rooftile.runtime.launch import BoundedCache, Kernel, empties, kind_of

# 32-bit registers of a multiprocessor, and threads of a program with one warpgroup that computes and one that copies
REGISTERS, THREADS = 65536, 256
# the forward of each kind of call that was seen: a graph of torch.compile, and whoever is watched, prepares none
_PLANS = BoundedCache()
Forward = Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec, tile: ForwardTile | None = None
) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, H, T), or packed (total_q, H, Dv) and (H, total_q); the tile may be given."""
    sizes = sizes_of(q, k, options)
    if not q.numel():
        o, lse = _outputs(q, sizes, spec)
        return o(), lse()
    if sizes.S == 0:
        # a descriptor needs an element; the kernel is told that there is none
        k, v = (x.new_zeros((*x.shape[:-3], 1, *x.shape[-2:])) for x in (k, v))
        if options.bias is not None:
            options = options._replace(bias=options.bias.new_zeros((1, 1, 1, 1)))
    q, k, v = readable(q), readable(k), readable(v)
    options = contiguous(options)
    key = (spec, sizes, tile, kind_of(q, k, v, *options))
    ready = _PLANS.get(key)
    if ready is None:
        ready = _PLANS[key] = _plan(q, sizes, spec, tile or tile_of(spec, sizes, q.device, bias_kind(options)))
    return ready(q, k, v, options)


def prepare(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> Forward | None:
    """The forward of tensors like these with all but the outputs and the launch done; None if one of them must be copied."""
    if not q.numel() or not k.numel() or not all(is_readable(x) for x in (q, k, v)):
        return None
    sizes = sizes_of(q, k, options)
    if not are_prepared(options, sizes):
        return None
    return _plan(q, sizes, spec, tile_of(spec, sizes, q.device, bias_kind(options)))


def _plan(q: Tensor, sizes: Sizes, spec: Spec, tile: ForwardTile) -> Forward:
    if spec.block_size is not None:
        return _plan_over_lists(q, sizes, spec, tile)
    launch = (plan_with_bias if tile.BIAS_STAGES else plan)(spec, sizes, tile, q.device)
    new_o, new_lse = _outputs(q, sizes, spec)
    device = q.device

    def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        o, lse = new_o(), new_lse()
        bias, _, sinks, _, cu_q, cu_k, *_ = options
        if bias is not None:
            bias = readable_bias(bias, bias_shape(sizes))
            launch(q, k, v, o, bias, q, k, v, o, bias, lse, lse if sinks is None else sinks, counter(device))
            return o, lse
        # no kernel reads what stands for an absent tensor
        sinks, cu_q, cu_k = lse if sinks is None else sinks, lse if cu_q is None else cu_q, lse if cu_k is None else cu_k
        launch(q, k, v, o, q, k, v, o, lse, sinks, cu_q, cu_k, cu_q, counter(device))
        return o, lse

    return run


def _plan_over_lists(q: Tensor, sizes: Sizes, spec: Spec, tile: ForwardTile) -> Forward:
    """The forward over lists of blocks, whose own sizes may change from call to call."""
    launch = plan_with_lists(spec, sizes, tile, q.device)
    new_o, new_lse = _outputs(q, sizes, spec)
    device = q.device

    def run(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        o, lse = new_o(), new_lse()
        sinks, cu_q, cu_k = (lse if x is None else x for x in (options.sinks, options.cu_q, options.cu_k))
        counts, indices = options.block_counts, options.block_indices
        assert counts is not None
        assert indices is not None
        bits = counts if options.block_bits is None else options.block_bits
        part = 0 if options.block_bits is None else bits.shape[3]
        steps = (*steps_of_lists(counts, sizes.Hk, spec.group), indices.shape[-1], part)
        launch(steps)(q, k, v, o, q, k, v, o, lse, sinks, cu_q, cu_k, counts, indices, bits, counter(device))
        return o, lse

    return run


def forward_gathered(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """The forward of what was copied out of its pages: whatever the lengths, by one kernel."""
    return forward(q, k, v, options, spec, paged_tile(spec))


def forward_paged(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse like q, of keys and values where they lie: copied by pages, each a box, or some, of the copy engine's."""
    rows, cu_q = cache.packed_queries(q)
    B, N = cache.table.shape
    sizes = Sizes(B=B, T=rows.shape[0], S=N * cache.size, H=q.shape[-2], Hk=cache.k.shape[2])
    spec = as_packed(spec)
    new_o, new_lse = _outputs(rows, sizes, spec)
    o, lse = new_o(), new_lse()
    if lse.numel() == 0:
        return o, lse
    q, k, v, table = readable(rows), cache.k, cache.v, cache.table.contiguous()
    sinks, cu_q, lengths = (lse if x is None else x.contiguous() for x in (options.sinks, cu_q, cache.lengths))
    pages = PageStrides(cache.size, table.stride(0), *steps_of_pages(k), *steps_of_pages(v))
    launch = plan(spec, sizes, paged_tile(spec), q.device, pages)
    launch(q, k, v, o, q, k, v, o, lse, sinks, cu_q, lengths, table, counter(q.device))
    return o, lse


class PageStrides(NamedTuple):
    """How keys and values lie in pages; all zero if they do not."""

    size: int = 0  # tokens of a page
    table_stride: int = 0
    k_page: int = 0  # steps from page to page and from head to head (see `steps_of_pages`)
    k_head: int = 0
    v_page: int = 0
    v_head: int = 0


def plan(
    spec: Spec, sizes: Sizes, tile: ForwardTile, device: torch.device, pages: PageStrides | None = None
) -> Callable[..., None]:
    """The forward's launch: of q, k, v and o for the copy engine, then of all tensors in the kernel's order."""
    pages = pages or PageStrides()
    tiles, programs, tail = schedule(sizes.T, sizes.H // tile.HEADS_PER_TILE, tile.rows, sizes, device, spec)
    numbers = (*pages[1:], sizes.B, sizes.S, tiles, tail, *numbers_of(spec))
    return _kernel(spec, tile, pages.size).bound((programs, 1, 1), numbers, constants(spec, tile, pages.size))


def plan_with_bias(spec: Spec, sizes: Sizes, tile: ForwardTile, device: torch.device) -> Callable[..., None]:
    """The forward's launch with a bias: of q, k, v, o and bias for the copy engine, then of all tensors in the kernel's order."""
    tiles, programs, tail = schedule(sizes.T, sizes.H, tile.rows, sizes, device, spec)
    numbers = (sizes.B, sizes.S, tiles, tail, *numbers_of(spec))
    return _kernel_with_bias(spec, tile).bound((programs, 1, 1), numbers, constants_without_pages(spec, tile))


def plan_with_lists(
    spec: Spec, sizes: Sizes, tile: ForwardTile, device: torch.device
) -> Callable[[tuple[int, ...]], Callable[..., None]]:  # fmt: skip
    """The forward's launch over lists, from their steps (`steps_of_lists`), the longest possible one and its blocks with bits."""
    tiles, programs, tail = schedule(sizes.T, sizes.H, tile.rows, sizes, device, spec, tile.PROGRAMS)
    numbers = (sizes.B, sizes.S, tiles, tail, *numbers_of(spec))
    start, own = _kernel_with_lists(spec, tile), constants_without_pages(spec, tile)
    return cache(lambda steps: start.bound((programs, 1, 1), (*steps, *numbers), own))


def can_read(cache: PagedKV) -> bool:
    """Whether the copy engine can read keys and values where they lie. It reads nothing from a cache without a block."""
    return cache.k.numel() > 0 and are_readable(cache.k) and are_readable(cache.v)


@lru_cache(maxsize=1024)
def tile_of(spec: Spec, sizes: Sizes, device: torch.device, bias: BiasKind | None = None) -> ForwardTile:
    """The tile, with as many query heads of a group together as save rounds of tiles, if that is a tenth of them or more."""
    if bias is not None:
        return biased_tile(spec, bias)
    if spec.block_size is not None:
        return listed_tile(spec)
    alone = forward_tile(spec, sizes.T)
    if spec.group == 1:
        return alone

    def rounds(tile: ForwardTile) -> int:
        tiles, heads = tiles_and_heads(sizes.T, sizes.H // tile.HEADS_PER_TILE, tile.rows, sizes, spec)
        return -(-tiles * heads // processors(device))

    best = min((alone._replace(HEADS_PER_TILE=2**i) for i in range(7) if spec.group % 2**i == 0), key=rounds)
    return best if 10 * rounds(best) <= 9 * rounds(alone) else alone


@cache
def _kernel(spec: Spec, tile: ForwardTile, size: int = 0) -> Kernel:
    describe = [partial(of_pages if len(box) == 4 else descriptor, box=box) for box in boxes(spec, tile, size)]
    return Kernel(kernel.flash_fwd, tuple(describe))


@cache
def _kernel_with_bias(spec: Spec, tile: ForwardTile) -> Kernel:
    describe = [partial(descriptor, box=box) for box in boxes(spec, tile)]
    return Kernel(kernel.flash_fwd_bias, (*describe, partial(bias_descriptor, box=(tile.BIAS_ROWS, tile.KEYS))))


@cache
def _kernel_with_lists(spec: Spec, tile: ForwardTile) -> Kernel:
    return Kernel(kernel.flash_fwd_listed, tuple(partial(descriptor, box=box) for box in boxes(spec, tile)))


def _outputs(q: Tensor, sizes: Sizes, spec: Spec) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Makes o, and makes lse."""
    new_o = empties((*q.shape[:-1], spec.dim_v), output_dtype(q, spec), q.device)
    return new_o, empties(rows_shape(sizes, spec), torch.float32, q.device)


def boxes(spec: Spec, tile: ForwardTile, size: int = 0) -> tuple[tuple[int, ...], ...]:
    """Returns the TMA boxes of q, k, v and o: heads, positions, elements. Out of bounds, loads are zeros and stores are dropped.

    For pages of `size` tokens, k and v have the boxes of `box_of_pages`.
    """
    dim, dim_v = padded(spec.dim), padded(spec.dim_v)
    heads, rows = tile.HEADS_PER_TILE, WARPGROUP // tile.HEADS_PER_TILE
    k, v = (1, tile.KEYS, dim), (1, tile.KEYS, dim_v)
    if size:
        k, v = (box_of_pages(dim, min(size, tile.KEYS), spec.dtype) for dim in (spec.dim, spec.dim_v))
    return (heads, rows, dim), k, v, (heads, rows, min(dim_v, 128))


@cache
def constants(spec: Spec, tile: ForwardTile, size: int = 0) -> dict[str, Any]:
    """The forward's compile-time arguments, put together once; `size` is the tokens of a page."""
    own = {"GROUP": spec.group, "D": padded(spec.dim), "DV": padded(spec.dim_v), "SINKS": spec.has_sinks, "num_warps": 4}
    return {"FLAGS": Flags(**flags_of(spec)), "TILE": tile} | own | {"PAGE_SIZE": size}


@cache
def constants_without_pages(spec: Spec, tile: ForwardTile) -> dict[str, Any]:
    """The compile-time arguments of the forward with a bias, or over lists."""
    found = {name: value for name, value in constants(spec, tile).items() if name != "PAGE_SIZE"}
    return found if tile.PROGRAMS == 1 else found | {"maxnreg": REGISTERS // (tile.PROGRAMS * THREADS)}
