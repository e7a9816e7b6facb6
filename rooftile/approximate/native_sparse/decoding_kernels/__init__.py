"""Native Sparse Attention of one query per sequence, in five launches that read a paged cache where it lies.

    compressed    attention to the compressed keys, in parts, and sums of their weights by blocks
    block_choice  the scores of blocks, and the best of each group of heads
    tokens        the selected and the near branch, in parts
    merge         parts to branches, branches to the output by their gates

Everything has the shape of the block tables, so no length is read from the device and a CUDA graph can hold it. Between the
launches are a few numbers per row, block and part; `rooftile.cost.approximate.native_sparse_decode` counts the bytes.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.native_sparse.decoding_kernels import block_choice, compressed, merge, tokens
from rooftile.approximate.native_sparse.decoding_kernels.shape import DecodingShape, parts_of, refusal, shape_of
from rooftile.runtime.launch import device_of

__all__ = ["decode", "refusal"]


def decode(
    q: Tensor, gates: Tensor, cache: list[Tensor], table: Tensor, near_table: Tensor, lengths: Tensor, *, scale: float,
    **sizes: Any,
) -> Tensor:  # fmt: skip
    """Returns o (B, H, Dv); the arguments are as in `rooftile.approximate.native_sparse.decoding.decode`."""
    (B, H, _), Hk, dim_v, size = q.shape, cache[0].shape[2], cache[1].shape[3], cache[2].shape[1]
    o = q.new_empty(B, H, dim_v)
    if not B:
        return o
    q = q if q.stride(2) == 1 else q.contiguous()
    table, near_table = (x if x.stride(1) == 1 else x.contiguous() for x in (table, near_table))
    shape = shape_of(q, Hk, dim_v, size, **sizes)
    steps = table.shape[1] * size // (shape.BLOCK * shape.NEW) + 1
    empty = partial(torch.empty, dtype=torch.float32, device=q.device)
    parts = empty(B, H, parts_of(shape), dim_v), *empty(2, B, H, parts_of(shape))
    sums, reference = empty(B, H, steps, 2, shape.NEW), empty(B, H, steps)
    chosen = torch.empty(B, Hk, shape.COUNT, dtype=torch.int32, device=q.device)
    kc, vc, k, v, near_k, near_v = cache
    constants = _constants(shape)
    with device_of(q):
        compressed.launch(q, kc, vc, table, lengths, parts, sums, reference, shape, constants, scale)
        block_choice.launch(sums, reference, *parts[1:], lengths, chosen, shape)
        tokens.launch(q, k, v, near_k, near_v, table, near_table, lengths, chosen, parts, shape, constants, scale)
        merge.launch(parts, gates.contiguous(), o, shape)
    return o


@cache
def _constants(shape: DecodingShape) -> dict[str, Any]:
    """One dictionary per shape: a launch knows it by its identity."""
    return {"SHAPE": shape, "num_warps": 4} | shape.options
