"""The plan of a launch: sizes, grid, numbers and flags, all except the tensors.

It depends only on shapes, strides and the spec, so a repeated call computes it once. Every `plan` function of this backend
returns the bound launch of one kernel, which takes only the tensors and holds none.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact.masks import FULL
from rooftile.exact.spec import Options, Sizes, Spec

# average tiles per program in the heads that are mixed at the end; packed tiles differ more
TAIL, PACKED_TAIL = 2, 3


class Schedule(NamedTuple):
    """The distribution of tiles to programs (see `device/scheduler`)."""

    tiles: int  # tiles per head; packed: slots, some of which stay empty
    programs: int  # programs that share all tiles
    tail: int  # the number of heads that are mixed at the end

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.programs, 1, 1


def schedule(
    length: int, heads: int, rows: int, sizes: Sizes, device: torch.device, spec: Spec, together: int = 1
) -> Schedule:  # fmt: skip
    """The schedule of tiles of `rows` over heads of `length` rows, with this many programs together on a multiprocessor."""
    tiles, heads = tiles_and_heads(length, heads, rows, sizes, spec)
    programs = min(tiles * heads, together * processors(device))
    # with a full mask all tiles of a dense head have the same length, so there is nothing to balance
    tail = PACKED_TAIL if spec.layout == "packed" else 0 if spec.mask == FULL else TAIL
    return Schedule(tiles, programs, min(-(-tail * programs // tiles), heads))


def tiles_and_heads(length: int, heads: int, rows: int, sizes: Sizes, spec: Spec) -> tuple[int, int]:
    """Tiles in a head, and heads in all. Packed sequences are one; what is counted then are slots, of which some stay empty."""
    if spec.layout == "packed":
        return length // rows + sizes.B, heads
    return -(-length // rows), sizes.B * heads


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def sizes_of(q: Tensor, k: Tensor, options: Options) -> Sizes:
    """The sizes of a call; packed, T and S are totals."""
    if options.cu_q is not None:
        return Sizes(B=options.cu_q.shape[0] - 1, T=q.shape[0], S=k.shape[0], H=q.shape[1], Hk=k.shape[1])
    return Sizes(B=q.shape[0], T=q.shape[1], S=k.shape[1], H=q.shape[2], Hk=k.shape[2])


def rows_shape(sizes: Sizes, spec: Spec) -> tuple[int, ...]:
    """The shape of lse."""
    return (sizes.H, sizes.T) if spec.layout == "packed" else (sizes.B, sizes.H, sizes.T)


class Numbers(NamedTuple):
    """The numbers of a spec, as every kernel takes them last."""

    scale: float
    softcap: float
    left: int
    right: int
    prefix: int
    chunk: int


@cache
def numbers_of(spec: Spec) -> Numbers:
    mask = spec.mask
    (chunk,) = mask.chunks or (0,)
    return Numbers(spec.scale, spec.softcap, mask.left or 0, mask.right or 0, mask.prefix or 0, chunk)


@cache
def flags_of(spec: Spec) -> dict[str, Any]:
    """The compile-time arguments that every kernel has: head dims, the mask's kind and the options."""
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
