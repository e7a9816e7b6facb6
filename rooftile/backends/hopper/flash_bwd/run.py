"""Starts the backward: which kernels a problem needs, their outputs, descriptors and numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.backends.hopper.counters import counter
from rooftile.backends.hopper.flash_bwd import dq_accumulator
from rooftile.backends.hopper.flash_bwd.dkdv import flash_bwd_kv
from rooftile.backends.hopper.flash_bwd.dq import flash_bwd_q
from rooftile.backends.hopper.flash_bwd.fused import flash_bwd
from rooftile.backends.hopper.flash_bwd.row_stats import Words, row_words
from rooftile.backends.hopper.flash_fwd.run import flags_of, numbers_of, processors, programs_and_tail, sizes_of
from rooftile.backends.hopper.tiles import WARPGROUP, backward_kv_tile, backward_q_tile, backward_tile, padded
from rooftile.backends.hopper.tma import descriptor, line, readable
from rooftile.launch import Describe, Kernel
from rooftile.masks import FULL
from rooftile.reference.gradients import sinks_gradient
from rooftile.spec import Grads, Options, Sizes, Spec


class _Call(NamedTuple):
    """What every kernel here takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    words: Words
    cu_q: Tensor
    cu_k: Tensor
    sizes: Sizes
    spec: Spec

    @property
    def lost(self) -> Tensor:
        """Where a NaN is noted; any tensor if none is."""
        return self.words.lse if self.words.lost is None else self.words.lost


def backward(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: Options,
    spec: Spec,
    repair: Callable[..., None],
) -> Grads:
    """Gradients in the shapes of q, k and v, and of the sinks.

    Head dims above 128, and whoever asks for an order of every sum, get two kernels of seven products in all, and dq is
    `flash_bwd_q`'s; the others one of five that adds dq up in memory. Where a mask, or another sequence, may hide a NaN that
    came through all the same, `repair` is told where one would be noted, and computes everything again if it was.
    """
    sizes = sizes_of(q, k, options)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if lse.numel() == 0:
        dsinks = None if options.sinks is None else torch.zeros_like(options.sinks)
        return Grads(dq.zero_(), dk.zero_(), dv.zero_(), None, dsinks)
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    q, k, v, o = readable(q), readable(k), readable(v), readable(o)
    care = spec.mask != FULL or spec.layout == "packed"
    do = None if do is None else readable(do)
    columns = padded(spec.dim) if _adds_up(spec) else 0
    words = row_words(o, do, lse, dlse, options.cu_q, care=care, sinks=spec.has_sinks, columns=columns)
    dsinks = None if words.rows is None else sinks_gradient(options.sinks, lse, words.rows)
    if sizes.S == 0:
        return Grads(dq.zero_(), dk, dv, None, dsinks)
    do = torch.zeros_like(o) if do is None else do
    cu_q, cu_k = (lse if x is None else x for x in (options.cu_q, options.cu_k))
    call = _Call(q, k, v, do, words, cu_q, cu_k, sizes, spec)
    parts = parts_of_group(spec, sizes, q.device)
    if parts > 1:
        # a key head's group in parts, each with sums of its own
        dk_parts, dv_parts = (x.new_empty((*x.shape[:-2], sizes.Hk * parts, x.shape[-1])) for x in (k, v))
    else:
        dk_parts, dv_parts = dk, dv
    if _width(spec) > 128:
        _keys(dk_parts, dv_parts, parts, call)
        _queries(dq, call)
    else:
        _together(dk_parts, dv_parts, parts, call)
        if words.sum_of_dq is None:
            _queries(dq, call)
        else:
            scale = 1.0 if spec.dtype == torch.float16 else spec.scale
            dq_accumulator.finish(words.sum_of_dq, dq, words.lost, options.cu_q, words.padded_T, scale)
    if parts > 1:
        for whole, each in ((dk, dk_parts), (dv, dv_parts)):
            torch.sum(each.unflatten(-2, (sizes.Hk, parts)), -2, out=whole)
    grads = Grads(dq, dk, dv, None, dsinks)
    if words.lost is not None:
        repair(words.lost, grads, do, q, k, v, words.stats, options, spec)
    return grads


# tiles a program, at least, so that none is left with a long one at the end
SHARE = 4


def parts_of_group(spec: Spec, sizes: Sizes, device: torch.device) -> int:
    """Into how many parts a key head's group of query heads is cut, where there are too few tiles of keys to go round.

    An order of the sums must not depend on what else is in the batch, so whoever asks for one gets one part.
    """
    if spec.deterministic:
        return 1
    rows = WARPGROUP if _width(spec) > 128 else 2 * WARPGROUP
    parts = 1
    while spec.group % (2 * parts) == 0:
        # packed slots that end up empty count too: a guess then
        tiles = sizes.S // rows + sizes.B if spec.layout == "packed" else -(-sizes.S // rows) * sizes.B
        if tiles * sizes.Hk * parts >= SHARE * processors(device):
            break
        parts *= 2
    return parts


def _adds_up(spec: Spec) -> bool:
    """Whether dq is added up in memory, in any order."""
    return _width(spec) <= 128 and not spec.deterministic


def _together(dk: Tensor, dv: Tensor, parts: int, call: _Call) -> None:
    """dk and dv, and dq added up if there is a sum."""
    spec, sizes, words = call.spec, call.sizes, call.words
    sum_of_dq = words.sum_of_dq
    tiles, programs, tail = programs_and_tail(sizes.S, sizes.Hk * parts, 2 * WARPGROUP, sizes, call.q.device, spec)
    unit = dq_accumulator.UNIT_ROWS.value, dq_accumulator.UNIT_COLUMNS.value
    nowhere = words.lse.new_empty(unit) if sum_of_dq is None else sum_of_dq
    described = (call.q, call.k, call.v, call.do, words.lse, words.delta, nowhere, dk, dv)
    tensors = (dk, dv, call.lost, call.cu_q, call.cu_k, counter(call.q.device))
    numbers = (sizes.B, sizes.T, sizes.S, words.padded_T, tiles, tail, *numbers_of(spec))
    constants = _constants_of_both(spec, parts, sum_of_dq is not None)
    _kernel_of_both(spec)((programs, 1, 1), (*described, *tensors, *numbers), constants)


def _keys(dk: Tensor, dv: Tensor, parts: int, call: _Call) -> None:
    spec, sizes, words = call.spec, call.sizes, call.words
    tiles, programs, tail = programs_and_tail(sizes.S, sizes.Hk * parts, WARPGROUP, sizes, call.q.device, spec)
    described = (call.q, call.k, call.v, call.do, words.lse, words.delta, dk, dv)
    tensors = (dk, dv, call.lost, call.cu_q, call.cu_k, counter(call.q.device))
    numbers = (sizes.B, sizes.T, sizes.S, words.padded_T, tiles, tail, *numbers_of(spec))
    _kernel_of_keys(spec)((programs, 1, 1), (*described, *tensors, *numbers), _constants_of_keys(spec, parts))


def _queries(dq: Tensor, call: _Call) -> None:
    spec, sizes, words = call.spec, call.sizes, call.words
    tiles, programs, tail = programs_and_tail(sizes.T, sizes.H, 2 * WARPGROUP, sizes, call.q.device, spec)
    described = (call.q, call.k, call.v, call.do, dq)
    tensors = (dq, call.lost, words.lse, words.delta, call.cu_q, call.cu_k, counter(call.q.device))
    numbers = (sizes.B, sizes.S, words.padded_T, tiles, tail, *numbers_of(spec))
    _kernel_of_queries(spec)((programs, 1, 1), (*described, *tensors, *numbers), _constants_of_queries(spec))


@cache
def _kernel_of_both(spec: Spec) -> Kernel:
    rows = _rows_of(spec)
    return Kernel(flash_bwd, (rows, rows, rows, rows, _WORDS, _WORDS, dq_accumulator.descriptor, rows, rows))


@cache
def _constants_of_both(spec: Spec, parts: int, add: bool) -> dict[str, Any]:
    return _constants(spec, parts) | backward_tile(spec)._asdict() | {"ACCUMULATE_DQ": add, "num_warps": 4}


@cache
def _kernel_of_keys(spec: Spec) -> Kernel:
    rows = _rows_of(spec)
    return Kernel(flash_bwd_kv, (rows, rows, rows, rows, _WORDS, _WORDS, rows, rows))


@cache
def _constants_of_keys(spec: Spec, parts: int) -> dict[str, Any]:
    return _constants(spec, parts) | backward_kv_tile(spec)._asdict() | {"num_warps": 4}


@cache
def _kernel_of_queries(spec: Spec) -> Kernel:
    return Kernel(flash_bwd_q, (_rows_of(spec),) * 5)


@cache
def _constants_of_queries(spec: Spec) -> dict[str, Any]:
    return _constants(spec, 0) | backward_q_tile(spec)._asdict() | {"num_warps": 4}


# 64 words of rows, as the kernels copy them
_WORDS = partial(line, count=WARPGROUP)


def _width(spec: Spec) -> int:
    """Columns of all rows in shared memory."""
    return padded(max(spec.dim, spec.dim_v))


def _rows_of(spec: Spec) -> Describe:
    """64 rows of a head, as every kernel here copies them: what they lack in columns comes as zeros, and is not stored."""
    return partial(descriptor, box=(1, WARPGROUP, _width(spec)))


@cache
def _constants(spec: Spec, parts: int) -> dict[str, Any]:
    """Compile-time arguments; `parts` 0: of the kernel for queries, which knows of none."""
    heads = {"GROUP": spec.group // parts, "GROUP_SPLITS": parts} if parts else {"GROUP": spec.group}
    return flags_of(spec) | heads | {"D": _width(spec), "FP16": spec.dtype == torch.float16}
