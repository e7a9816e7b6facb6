"""FlexAttention's block masks as lists of blocks, with bits for the blocks that are seen in part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.blocks.lists import BITS, LEAST, packed

# bytes of bits that a mask may have, and pairs that its function is asked for at a time
MOST_BYTES = 1 << 30
PAIRS_AT_ONCE = 1 << 24


def lists_of_block_mask(mask: Any) -> tuple[Tensor, Tensor, tuple[int, int], Tensor | None]:
    """Returns counts, indices, size and bits of a `BlockMask`.

    Blocks that are seen in part come first in a list. The host reads how many there are at most.

    Raises:
        InvalidInput: blocks of a size that is no multiple of 64, or bits that take more than 1 GiB.
    """
    rows, keys = (int(n) for n in mask.BLOCK_SIZE)
    if rows % LEAST or keys % LEAST:
        raise InvalidInput(
            f"the BlockMask has blocks of {rows} x {keys}; must be multiples of {LEAST}: create_block_mask(..., BLOCK_SIZE=128)"
        )
    T, S = (int(n) for n in mask.shape[-2:])
    count, parts = mask.kv_num_blocks, mask.kv_indices
    device, most = count.device, parts.shape[-1]
    place = torch.arange(most, device=device, dtype=torch.int32).expand(parts.shape)
    whole = torch.zeros_like(count) if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks
    indices = parts
    if mask.full_kv_indices is not None:
        # blocks with bits come first
        behind = (place - count[..., None]).clamp(min=0).long()
        indices = torch.where(place < count[..., None], parts, mask.full_kv_indices.gather(-1, behind))
    n = int(count.max()) if count.numel() else 0
    size = count.numel() * n * rows * keys // 8
    if size > MOST_BYTES:
        raise InvalidInput(
            f"the BlockMask has {count.numel()} lists of up to {n} blocks that are seen in part: {size / 2**30:.1f} GiB of bits; "
            "at most 1 GiB, so write bias=, or make its blocks smaller"
        )
    bits = torch.full((*count.shape, n, rows, keys // BITS), -1, dtype=torch.int32, device=device)
    # the places of blocks in part, as (b, h, block of queries, place)
    found = torch.nonzero(place[..., :n] < count[..., None])
    for some in found.split(max(PAIRS_AT_ONCE // (rows * keys), 1)):
        b, h, i, slot = some.unbind(-1)
        at_row = (i[:, None] * rows + torch.arange(rows, device=device))[:, :, None]
        at_key = (parts[b, h, i, slot].long()[:, None] * keys + torch.arange(keys, device=device))[:, None]
        # a function may read tables of these lengths
        seen = mask.mask_mod(b[:, None, None], h[:, None, None], at_row.clamp(max=T - 1), at_key.clamp(max=S - 1))
        bits[b, h, i, slot] = packed(seen.expand(len(some), rows, keys))
    # copies: the mask's own tensors may come from inference mode
    return (count + whole).to(torch.int32), indices.to(torch.int32, copy=True), (rows, keys), bits if n else None
