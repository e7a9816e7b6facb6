"""Attention without padded keys: packed keys where the answer is the same, else a boolean bias.

The queries stay as they are, those at padded positions too: each attends to the keys of its sequence that are no padding. So only
keys and values are packed, next to T queries of each sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.ops.unpad import take_rows
from rooftile.exact.spec import Call, CallSettings, Options
from rooftile.exact.validate import check_dense_bias
from rooftile.runtime.arguments import shown
from rooftile.runtime.launch import is_capturing
from rooftile.runtime.operators import mapped, transformed


def without_padding(call: Call, padding: Tensor) -> Call:
    """Returns a call with the same answer in which no query sees a key where `padding` (B, S) is True.

    Reads the padding, which waits for a GPU. It is not read where that is impossible: by torch.compile, in a CUDA graph, or if
    vmap maps it.
    """
    q, k, v, mask, options, settings, _ = call
    if not _fits(q, k, v, mask, padding):
        # the checks of every call say what is wrong
        return call
    real = ~padding
    # lists count keys from the first
    if options.bias is None and options.block_counts is None and _may_read(real):
        S = k.shape[1]
        number = real.to(torch.int32)
        # one copy to the host: each sequence's number of keys, its first one, and the end of its last one
        rows = torch.stack([number.sum(1), number.argmax(1), S - number.flip(1).argmax(1)], dim=1).tolist()
        runs = {(first, end) for count, first, end in rows if count}
        unbroken = all(end - first == count for count, first, end in rows if count)
        if _is_same(mask or FULL, options, settings, runs, S if unbroken else -1):
            if unbroken and len(runs) == 1 and all(count for count, _, _ in rows):
                ((first, end),) = runs
                return call._replace(k=k[:, first:end], v=v[:, first:end])
            return _packed(call, real)
    seen = real[:, None, None]  # (B, 1, 1, S)
    if options.bias is not None:
        seen = torch.where(seen, check_dense_bias(options.bias, q, k), float("-inf"))
    return call._replace(options=options._replace(bias=seen))


def with_padding(o: Tensor, lse: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the packed results of `without_padding` as (B, T, H, Dv) and (B, H, T)."""
    return o.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


def _fits(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, padding: Tensor) -> bool:
    """Whether the other arguments are such that padding means something. Raises InvalidInput if it is wrong itself."""
    if any(not isinstance(x, Tensor) or x.ndim != 4 for x in (q, k, v)) or not isinstance(mask, Mask | None):
        return False
    if q.is_nested or k.is_nested or v.is_nested:
        raise InvalidInput("key_padding_mask with nested tensors; has none: nested tensors have no padding")
    due = f"a boolean tensor (B, S) = {tuple(k.shape[:2])}, True for keys that no query sees"
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or padding.shape != k.shape[:2]:
        raise InvalidInput(f"key_padding_mask is {shown(padding)}; must be {due}")
    if padding.device != k.device:
        raise InvalidInput(f"key_padding_mask is on {padding.device}; k is on {k.device}, and they must be on one device")
    return q.shape[0] == k.shape[0] and v.shape[:2] == k.shape[:2]


def _may_read(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_meta or not x.numel():
        return False
    return not (transformed() and mapped(x)) and not (x.is_cuda and is_capturing())


def _is_same(mask: Mask, options: Options, settings: CallSettings, runs: set[tuple[int, int]], S: int) -> bool:
    """Whether attention to the seen keys alone gives the same answer.

    runs: the first key of each sequence and the end of its last. S: their number, -1 if padding lies between keys.
    """
    if mask.targets:
        # they are the last keys, padding or not
        return False
    at_start, at_end = (S >= 0 and all(run[n] == edge for run in runs) for n, edge in ((0, 0), (1, S)))
    if settings.dropout and not at_start:
        # it counts keys from the first
        return False
    if mask.is_full and options.alibi is None:
        return True
    # a window and ALiBi count from the last key, prefixes and chunks from the first
    return at_end and (at_start or (mask.prefix is None and not mask.chunks))


def _packed(call: Call, real: Tensor) -> Call:
    q, B, T = call.q, *call.q.shape[:2]
    rows = real.flatten().nonzero()[:, 0]
    k, v = (take_rows(x.flatten(0, 1), rows) for x in (call.k, call.v))  # (total_k, Hk, D)
    cu_q = torch.arange(B + 1, dtype=torch.int32, device=q.device) * T
    cu_k = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    options = call.options._replace(cu_q=cu_q, cu_k=cu_k)
    return call._replace(q=q.flatten(0, 1), k=k, v=v, options=options, is_packed=True)
