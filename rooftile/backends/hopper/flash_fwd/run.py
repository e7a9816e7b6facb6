"""Starts the forward: outputs, descriptors, numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from rooftile.backends.hopper.counters import counter
from rooftile.backends.hopper.flash_fwd import kernel
from rooftile.backends.hopper.tiles import WARPGROUP, Tile, forward_tile, padded, paged_tile
from rooftile.backends.hopper.tma import (
    are_readable,
    box_of_pages,
    descriptor,
    is_readable,
    of_pages,
    readable,
    steps_of_pages,
)
from rooftile.backends.paged_by_gather import as_packed
from rooftile.kvcache import PagedKV
from rooftile.launch import Kernel, empties
from rooftile.masks import FULL
from rooftile.spec import Options, Sizes, Spec


def forward(
    q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Returns o (B, T, H, Dv) and lse (B, H, T), or packed (total_q, H, Dv) and (H, total_q); the tile may be given."""
    sizes = sizes_of(q, k, options)
    o, lse = _outputs(q, v, sizes)
    if lse.numel() == 0:
        return o, lse
    if sizes.S == 0:
        # a descriptor needs an element; the kernel is told that there is none
        k, v = (x.new_zeros((*x.shape[:-3], 1, *x.shape[-2:])) for x in (k, v))
    q, k, v = readable(q), readable(k), readable(v)
    tile = tile or tile_of(spec, sizes, q.device)
    grid, numbers = _numbers(q.device, sizes, tile, spec)
    sinks, cu_q, cu_k = (lse if x is None else x.contiguous() for x in (options.sinks, options.cu_q, options.cu_k))
    tensors = (q, k, v, o, lse, sinks, cu_q, cu_k, cu_q, counter(q.device))
    _kernel(spec, tile)(grid, (q, k, v, o, *tensors, 0, 0, 0, 0, 0, *numbers), constants(spec, tile))
    return o, lse


def forward_gathered(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """The forward of what was copied out of its pages: whatever the lengths, by one kernel."""
    return forward(q, k, v, options, spec, paged_tile(spec))


def forward_paged(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse like q, of keys and values where they lie: copied by pages, each a box, or some, of the copy engine's."""
    rows, cu_q = cache.packed_queries(q)
    B, N = cache.table.shape
    sizes = Sizes(B=B, T=rows.shape[0], S=N * cache.size, H=q.shape[-2], Hk=cache.k.shape[2])
    spec = as_packed(spec)
    o, lse = _outputs(rows, cache.v, sizes)
    if lse.numel() == 0:
        return o, lse
    q, table = readable(rows), cache.table.contiguous()
    tile = paged_tile(spec)
    grid, numbers = _numbers(q.device, sizes, tile, spec)
    sinks, cu_q, lengths = (lse if x is None else x.contiguous() for x in (options.sinks, cu_q, cache.lengths))
    tensors = (q, cache.k, cache.v, o, lse, sinks, cu_q, lengths, table, counter(q.device))
    strides = table.stride(0), *steps_of_pages(cache.k), *steps_of_pages(cache.v)
    arguments = (q, cache.k, cache.v, o, *tensors, *strides, *numbers)
    _kernel(spec, tile, cache.size)(grid, arguments, constants(spec, tile, cache.size))
    return o, lse


def can_read(cache: PagedKV) -> bool:
    """Whether the copy engine can read keys and values where they lie. It reads nothing from a cache without a block."""
    return cache.k.numel() > 0 and are_readable(cache.k) and are_readable(cache.v)


def prepare(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """The forward for tensors like these and no options, with all but the outputs and the launch done beforehand."""
    sizes = sizes_of(q, k, Options())
    if not q.numel() or not k.numel() or not all(is_readable(x) for x in (q, k, v)):
        return None
    tile = tile_of(spec, sizes, q.device)
    grid, numbers = _numbers(q.device, sizes, tile, spec)
    launch = _kernel(spec, tile).bound(grid, (0, 0, 0, 0, 0, *numbers), constants(spec, tile))
    new_o = empties((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    new_lse = empties((sizes.B, sizes.H, sizes.T), torch.float32, q.device)
    device = q.device

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = new_o(), new_lse()
        launch(q, k, v, o, q, k, v, o, lse, lse, lse, lse, lse, counter(device))
        return o, lse

    return run


@lru_cache(maxsize=1024)
def tile_of(spec: Spec, sizes: Sizes, device: torch.device) -> Tile:
    """The tile, with as many query heads of a group together as save rounds of tiles, if that is a tenth of them or more."""
    alone = forward_tile(spec, sizes.T)
    if spec.group == 1:
        return alone

    def rounds(tile: Tile) -> int:
        tiles, heads = tiles_and_heads(sizes.T, sizes.H // tile.HEADS_PER_TILE, tile.rows, sizes, spec)
        return -(-tiles * heads // processors(device))

    best = min((alone._replace(HEADS_PER_TILE=2**i) for i in range(7) if spec.group % 2**i == 0), key=rounds)
    return best if 10 * rounds(best) <= 9 * rounds(alone) else alone


@cache
def _kernel(spec: Spec, tile: Tile, size: int = 0) -> Kernel:
    describe = [partial(of_pages if len(box) == 4 else descriptor, box=box) for box in boxes(spec, tile, size)]
    return Kernel(kernel.flash_fwd, tuple(describe))


def sizes_of(q: Tensor, k: Tensor, options: Options) -> Sizes:
    if options.cu_q is not None:
        return Sizes(B=options.cu_q.shape[0] - 1, T=q.shape[0], S=k.shape[0], H=q.shape[1], Hk=k.shape[1])
    return Sizes(B=q.shape[0], T=q.shape[1], S=k.shape[1], H=q.shape[2], Hk=k.shape[2])


def _outputs(q: Tensor, v: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Empty o and lse."""
    rows = (sizes.H, sizes.T) if q.ndim == 3 else (sizes.B, sizes.H, sizes.T)
    o = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    return o, torch.empty(rows, dtype=torch.float32, device=q.device)


def boxes(spec: Spec, tile: Tile, size: int = 0) -> tuple[tuple[int, ...], ...]:
    """What one copy takes of q, k, v and o: heads, positions, elements. What there is not comes as zeros, and is not stored.

    Of pages of `size` tokens k and v have boxes of another kind: `box_of_pages`.
    """
    dim, dim_v = padded(spec.dim), padded(spec.dim_v)
    heads, rows = tile.HEADS_PER_TILE, WARPGROUP // tile.HEADS_PER_TILE
    k, v = (1, tile.KEYS, dim), (1, tile.KEYS, dim_v)
    if size:
        k, v = (box_of_pages(dim, min(size, tile.KEYS), spec.dtype) for dim in (spec.dim, spec.dim_v))
    return (heads, rows, dim), k, v, (heads, rows, min(dim_v, 128))


# tiles a program, on average, that the heads taken together at the end have; packed ones are less alike
TAIL, PACKED_TAIL = 2, 3


def _numbers(device: torch.device, sizes: Sizes, tile: Tile, spec: Spec) -> tuple[tuple[int, int, int], tuple[float, ...]]:
    """The grid and the kernel's numbers."""
    tiles, programs, tail = programs_and_tail(sizes.T, sizes.H // tile.HEADS_PER_TILE, tile.rows, sizes, device, spec)
    return (programs, 1, 1), (sizes.B, sizes.S, tiles, tail, *numbers_of(spec))


@cache
def numbers_of(spec: Spec) -> tuple[float, ...]:
    """scale, softcap, left, right, prefix, chunk."""
    mask = spec.mask
    (chunk,) = mask.chunks or (0,)
    return spec.scale, spec.softcap, mask.left or 0, mask.right or 0, mask.prefix or 0, chunk


def programs_and_tail(
    length: int, heads: int, rows: int, sizes: Sizes, device: torch.device, spec: Spec
) -> tuple[int, int, int]:
    """Tiles of `rows` in a head of `length` rows, how many programs share them, and how many heads are taken together last."""
    tiles, heads = tiles_and_heads(length, heads, rows, sizes, spec)
    programs = min(tiles * heads, processors(device))
    # with a full mask every tile of a dense head has the same length, and there is nothing to even out
    together = PACKED_TAIL if spec.layout == "packed" else 0 if spec.mask == FULL else TAIL
    tail = min(-(-together * programs // tiles), heads)
    return tiles, programs, tail


def tiles_and_heads(length: int, heads: int, rows: int, sizes: Sizes, spec: Spec) -> tuple[int, int]:
    """Tiles in a head, and heads in all. Packed sequences are one; what is counted then are slots, of which some stay empty."""
    if spec.layout == "packed":
        return length // rows + sizes.B, heads
    return -(-length // rows), sizes.B * heads


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def flags_of(spec: Spec) -> dict[str, Any]:
    """What every kernel is compiled for: head dims, the mask's kind and the options."""
    mask = spec.mask
    return {
        "DIM": spec.dim,
        "DIM_V": spec.dim_v,
        "PACKED": spec.layout == "packed",
        "LEFT": mask.left is not None,
        "RIGHT": mask.right is not None,
        "PREFIX": mask.prefix is not None,
        "CHUNK": bool(mask.chunks),
        "SOFTCAP": spec.softcap > 0,
    }


@cache
def constants(spec: Spec, tile: Tile, size: int = 0) -> dict[str, Any]:
    """The forward's compile-time arguments, put together once; `size` is that of pages."""
    own = {"GROUP": spec.group, "D": padded(spec.dim), "DV": padded(spec.dim_v), "SINKS": spec.has_sinks, "num_warps": 4}
    return flags_of(spec) | own | {"PAGE_SIZE": size} | tile._asdict()
