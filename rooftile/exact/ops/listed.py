"""Lists of key blocks as tensors of a call: checked against its lengths, and transposed where there will be a backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.blocks import Blocks
from rooftile.exact.masks import FULL
from rooftile.exact.spec import Call, Options, replaced
from rooftile.runtime.arguments import shown
from rooftile.runtime.operators import levels_of_gradients, mapped, transformed, wants_grad


def with_blocks(call: Call, blocks: Any, validate: bool = False) -> Call:
    """Returns a call with its lists among the options and their size among the settings. A FlexAttention BlockMask becomes lists.

    Raises InvalidInput where the lists do not fit.
    """
    q, k, v, options = call.q, call.k, call.v, call.options
    mask: Any = call.mask
    if type(mask).__name__ == "BlockMask":
        if blocks is not None:
            raise InvalidInput("mask is a BlockMask and there are blocks=, too; needs one of them")
        _check_lengths_of(mask, q, k, options)
        mask, blocks = FULL, Blocks.from_block_mask(mask)
    if blocks is None:
        return call
    if not isinstance(blocks, Blocks):
        raise InvalidInput(f"blocks is {shown(blocks)}; must be rooftile.Blocks, such as Blocks.from_dense(keep)")
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or q.is_nested or k.is_nested:
        came = "nested tensors" if isinstance(q, Tensor) and q.is_nested else "q or k that is no tensor"
        raise InvalidInput(f"blocks with {came}; needs dense ones, or packed ones with offsets")
    if q.ndim != (3 if options.cu_q is not None else 4) or k.ndim != q.ndim:
        # the checks of every call say what is wrong
        return call
    n = _check_fit(blocks, q, k, options)
    if (blocks.counts.device.type == "cpu" or blocks.validate or validate) and not torch.compiler.is_compiling():
        _read(blocks, n)
    lists = {"block_counts": blocks.counts, "block_indices": blocks.indices, "block_bits": blocks.bits}
    records = levels_of_gradients if transformed() else wants_grad
    if records(q, k, v, options.bias, options.sinks):
        packed = options.cu_q is not None and options.cu_k is not None
        seen_from_keys = blocks.transposed_packed(n, options.cu_q, options.cu_k) if packed else blocks.transposed(n)
        lists |= {"key_counts": seen_from_keys.counts, "key_entries": seen_from_keys.entries}
        if not torch.compiler.is_compiling():
            # a backward keeps no tensor that was made in inference mode
            lists = {name: x.clone() if x is not None and x.is_inference() else x for name, x in lists.items()}
    lists = {name: None if x is None else x.contiguous() for name, x in lists.items()}
    return call._replace(
        mask=mask, options=replaced(options, **lists), settings=call.settings._replace(block_size=blocks.block_size)
    )


def _check_fit(blocks: Blocks, q: Tensor, k: Tensor, options: Options) -> int:
    """Returns how many blocks of keys there are: in packed calls as many as there are places for them."""
    (rows, keys), counts = blocks.block_size, blocks.counts
    if counts.device != q.device:
        raise InvalidInput(f"blocks is on {counts.device}; q is on {q.device}, and all inputs must be on one device")
    if transformed() and mapped(*(x for x in (counts, blocks.indices, blocks.bits) if x is not None)):
        raise InvalidInput("blocks is mapped by torch.vmap; must be the same for all samples: write its axis as the batch's")
    H, Hk = q.shape[-2], k.shape[-2]
    if counts.shape[1] not in (1, Hk, H):
        raise InvalidInput(f"blocks has lists for {counts.shape[1]} heads; must be 1, or {Hk} of k, or {H} of q")
    if options.cu_q is not None and options.cu_k is not None:
        sequences = options.cu_q.shape[0] - 1
        due, n = q.shape[0] // rows + sequences, k.shape[0] // keys + sequences
        if counts.shape[0] != 1 or counts.shape[2] != due:
            raise InvalidInput(
                f"blocks.counts is {tuple(counts.shape)}; for {q.shape[0]} packed queries of {sequences} sequences it must be "
                f"(1, heads, {due}): sequence b has its lists from cu_q[b] // {rows} + b on"
            )
        return n
    B, T, S = q.shape[0], q.shape[1], k.shape[1]
    due = -(-T // rows)
    if counts.shape[0] not in (1, B):
        raise InvalidInput(f"blocks has lists for a batch of {counts.shape[0]}; must be 1 or {B}, the batch of q")
    if counts.shape[2] != due:
        raise InvalidInput(f"blocks has lists for {counts.shape[2]} blocks of queries; {T} queries in blocks of {rows} are {due}")
    return -(-S // keys)


def _check_lengths_of(block_mask: Any, q: Tensor, k: Tensor, options: Options) -> None:
    if options.cu_q is not None:
        raise InvalidInput("mask is a BlockMask in a packed call; needs a mask such as CAUSAL, or blocks= in packed places")
    B, H, T, S = (int(n) for n in block_mask.shape)
    if isinstance(q, Tensor) and isinstance(k, Tensor) and q.ndim == k.ndim == 4:
        due = q.shape[1], k.shape[1]
        if due != (T, S) or B not in (1, q.shape[0]) or H not in (1, k.shape[2], q.shape[2]):
            raise InvalidInput(
                f"the BlockMask is made for (B, H, T, S) = {(B, H, T, S)}; q and k need {(q.shape[0], q.shape[2], *due)}, with B "
                "and H or 1: make it anew by create_block_mask"
            )


def _read(blocks: Blocks, n: int) -> None:
    """Looks at the lists themselves."""
    counts, indices = blocks.counts, blocks.indices
    most = indices.shape[-1]
    if counts.numel() and (int(counts.min()) < 0 or int(counts.max()) > most):
        raise InvalidInput(f"blocks.counts has {int(counts.min())} to {int(counts.max())}; a list has room for 0 to {most}")
    is_listed = torch.arange(most, device=counts.device) < counts[..., None]
    listed = indices[is_listed]
    if listed.numel() and not 0 <= int(listed.min()) <= int(listed.max()) < n:
        first, last = int(listed.min()), int(listed.max())
        raise InvalidInput(f"blocks.indices has {first} to {last}; there are blocks of keys 0 to {n - 1}")
    alone = torch.where(is_listed, indices, -1 - torch.arange(most, device=counts.device, dtype=torch.int32))
    in_order = alone.sort(-1).values
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise InvalidInput("blocks.indices has a block twice in a list; must have each once")
