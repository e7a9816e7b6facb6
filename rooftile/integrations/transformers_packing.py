"""Attention without padded tokens, and of sequences that share a row, for the models of Transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.exact import api
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.ops.unpad import put_rows, take_rows
from rooftile.integrations.transformers_lazy_mask import LazyMask
from rooftile.integrations.transformers_mask import numbered


class Packing(NamedTuple):
    """The real tokens of a padded batch: indices into (B T,) and (B S,), None for all; and their offsets."""

    queries: Tensor | None
    keys: Tensor | None
    cu_q: Tensor
    cu_k: Tensor


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, pattern: Mask, packing: Packing, options: dict[str, Any]
) -> Tensor:  # fmt: skip
    """Computes attention (B, T, H, Dv) on the real tokens; padded queries get zeros."""
    B, T = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if packing.queries is not None:
        q = take_rows(q, packing.queries)
    if packing.keys is not None:
        k, v = (take_rows(x, packing.keys) for x in (k, v))
    o = api.attention_packed(q, k, v, packing.cu_q, packing.cu_k, pattern, **options)
    if packing.queries is not None:
        o = put_rows(o, packing.queries, B * T)
    return o.unflatten(0, (B, T))


def attend_with_bias(
    q: Tensor, k: Tensor, v: Tensor, pattern: Mask, packing: Packing, bias: Tensor, options: dict[str, Any]
) -> Tensor:  # fmt: skip
    """`attend_packed` with a bias (1|B, 1|H, T, S), whose columns are the key slots of the padded batch.

    What a query does not see becomes -inf in a bias of the whole batch (B, H, T, S): its rows have different keys in each
    sequence, so a bias that the batch shares cannot stay shared.
    """
    hidden = ~_seen(packing, pattern, *q.shape[:2], k.shape[1])
    return api.attention(q, k, v, FULL, bias=bias.masked_fill(hidden, float("-inf")), **options)


def _seen(packing: Packing, pattern: Mask, B: int, T: int, S: int) -> Tensor:
    """Returns (B, 1, T, S), True where a real query sees a real key."""
    lengths = [cu.diff() for cu in (packing.cu_q, packing.cu_k)]
    (sequence_q, i), (sequence_k, j) = (
        _places(rows, cu, count)
        for rows, cu, count in ((packing.queries, packing.cu_q, B * T), (packing.keys, packing.cu_k, B * S))
    )
    # the last query of a sequence sees its last key
    shift = torch.cat([lengths[0].new_zeros(1), lengths[1] - lengths[0]])
    i = (i + shift[sequence_q]).view(B, 1, T, 1)
    j = j.view(B, 1, 1, S)
    sequence_q, sequence_k = sequence_q.view(B, 1, T, 1), sequence_k.view(B, 1, 1, S)
    same = (sequence_q == sequence_k) & (sequence_k > 0)
    return same & (j >= pattern.first_key(i)) & (j <= pattern.last_key(i))


def _places(rows: Tensor | None, cu: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the sequence of each slot (count,), from 1, 0 for padding, and the slot's position in it."""
    total = torch.arange(count if rows is None else rows.shape[0], device=cu.device)
    sequence = torch.bucketize(total, cu[1:].long(), right=True)
    position = total - cu.long()[sequence.clamp(max=cu.shape[0] - 1)]
    # slots behind the last offset belong to no sequence
    sequence = torch.where(sequence < cu.shape[0] - 1, sequence + 1, 0)
    if rows is None:
        return sequence, position
    return put_rows(sequence, rows, count), put_rows(position, rows, count)


def packing_of_mask(mask: LazyMask) -> Packing | None:
    """Returns the packing that a mask decides, None if nothing is padded or packed. The first layer of a forward computes it."""
    sequences = mask.decision.sequences
    if sequences is None:
        return None
    if "packing" not in mask.kept:
        B, _, T, _ = mask.shape
        packing = _packing_of(sequences, T)
        if mask.decision.of_keys_only:
            cu_q = T * torch.arange(B + 1, dtype=torch.int32, device=sequences.device)
            packing = packing._replace(queries=None, cu_q=cu_q)
        mask.kept["packing"] = packing
    return mask.kept["packing"]  # type: ignore[no-any-return]


def _packing_of(sequences: Tensor, T: int) -> Packing:
    """Builds the packing from the sequence number of each key slot (B, S), as in a `Decision`, and T."""
    slots = (sequences >= 0).sum(1, keepdim=True) - T + torch.arange(T, device=sequences.device)
    of_queries = sequences.gather(1, slots.clamp(min=0))  # (B, T)
    count = int(sequences.max()) if sequences.numel() else 0
    indices, offsets = [], []
    for numbers in (of_queries, sequences):
        there = numbers.flatten().clamp(min=0)
        lengths = torch.bincount(there, minlength=count + 1)[1:]
        indices.append(there.nonzero()[:, 0])
        offsets.append(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32))
    return Packing(*indices, *offsets)


def restarts(position_ids: Tensor, q: Tensor, k: Tensor) -> Packing | None:
    """Returns the packing of rows (B, T) whose position_ids restart, or None if none does.

    Without a cache, Transformers detects these itself, and the mask contains them; with a cache it does not.
    """
    B, T = q.shape[:2]
    if T == 1 or k.shape[1] != T or position_ids.shape not in ((1, T), (B, T)):
        return None
    if torch.compiler.is_compiling() or position_ids.is_meta:
        # there are no values to read
        return None
    if position_ids.is_inference():
        # such tensors do not count their changes, so no answer can be kept for later layers
        return _packing_of_positions(position_ids, B)
    kept = position_ids.__dict__.setdefault("_rooftile", {})
    if (B, position_ids._version) not in kept:
        kept[B, position_ids._version] = _packing_of_positions(position_ids, B)
    return kept[B, position_ids._version]


def _packing_of_positions(position_ids: Tensor, B: int) -> Packing | None:
    first = position_ids[:, :1]
    starts = torch.diff(position_ids, prepend=first - 1, dim=-1) != 1
    # other jumps of positions (images in text) stay in one sequence
    if not bool((starts & (position_ids == first)).any()) or not bool((position_ids == first)[starts].all()):
        return None
    rows = starts.cumsum(1).expand(B, position_ids.shape[1])
    return _packing_of(numbered(rows), rows.shape[1])
