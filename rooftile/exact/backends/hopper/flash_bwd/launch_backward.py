"""Starts the backward: which kernels a problem needs, their outputs and their launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rooftile.exact.backends.device.row_stats import rest_of
from rooftile.exact.backends.hopper.bias import are_prepared, bias_descriptor, bias_kind, bias_shape, contiguous, readable_bias
from rooftile.exact.backends.hopper.counters import counter
from rooftile.exact.backends.hopper.flash_bwd import dq_accumulator, row_stats
from rooftile.exact.backends.hopper.flash_bwd.dkdv import flash_bwd_kv
from rooftile.exact.backends.hopper.flash_bwd.dq import flash_bwd_q
from rooftile.exact.backends.hopper.flash_bwd.fused import flash_bwd, flash_bwd_bias, flash_bwd_listed
from rooftile.exact.backends.hopper.flash_bwd.row_stats import RowStats
from rooftile.exact.backends.hopper.plan import flags_of, numbers_of, processors, schedule, sizes_of
from rooftile.exact.backends.hopper.tiles import (
    WARPGROUP,
    BiasKind,
    Flags,
    backward_kv_tile,
    backward_q_tile,
    backward_tile,
    biased_backward_tile,
    padded,
)
from rooftile.exact.backends.hopper.tma import descriptor, is_readable, line, readable
from rooftile.exact.blocks.lists import steps_of_lists
from rooftile.exact.reference.gradients import sinks_gradient
from rooftile.exact.spec import BackwardInputs, Grads, Options, Sizes, Spec, grad_dtype
from rooftile.runtime.launch import BoundedCache, Describe, Kernel, empties, kind_of

# the backward of each kind of call that was seen: a graph of torch.compile, and whoever is watched, prepares none
_PLANS = BoundedCache()
Backward = Callable[[BackwardInputs], Grads]


def backward(
    inputs: BackwardInputs, spec: Spec, repair: Callable[..., Callable[..., None]], bias_gradient: Callable[..., Tensor]
) -> Grads:
    """Gradients in the shapes of q, k and v, and of the bias and the sinks."""
    do, dlse, q, k, v, o, lse, options = inputs
    sizes = sizes_of(q, k, options)
    if lse.numel() == 0:
        dbias = torch.zeros_like(options.bias) if options.bias is not None and spec.bias_grad else None
        dsinks = None if options.sinks is None else torch.zeros_like(options.sinks)
        return Grads(*_zeros(q, k, v, spec), dbias, dsinks)
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
    q, k, v, o = readable(q), readable(k), readable(v), readable(o)
    options = contiguous(options)
    do = None if do is None else readable(do)
    if sizes.S == 0:
        stats_of = row_stats.plan(o, do, dlse, sizes, spec, check_nan=False, columns=0)
        cu_q = lse if options.cu_q is None else options.cu_q
        stats = stats_of(o, o if do is None else do, lse, lse if dlse is None else dlse, cu_q)
        return _without_keys(stats, q, k, v, lse, options, spec)
    key = (spec, repair, bias_gradient, kind_of(do, dlse, q, k, v, o, lse, *options))
    ready = _PLANS.get(key)
    if ready is None:
        ready = _PLANS[key] = _plan(do, dlse, q, k, v, o, options, spec, repair, bias_gradient)
    return ready(BackwardInputs(torch.zeros_like(o) if do is None else do, dlse, q, k, v, o, lse, options))


def prepare(
    inputs: BackwardInputs, spec: Spec, repair: Callable[..., Callable[..., None]], bias_gradient: Callable[..., Tensor]
) -> Backward | None:
    """The backward of tensors like these with all but the outputs and the launches done; None if one of them must be copied."""
    do, dlse, q, k, v, o, lse, options = inputs
    if do is None or not lse.numel() or not k.numel() or not all(is_readable(x) for x in (q, k, v, o, do)):
        return None
    if not all(x is None or x.is_contiguous() for x in (lse, dlse)) or not are_prepared(options, sizes_of(q, k, options)):
        return None
    return _plan(do, dlse, q, k, v, o, options, spec, repair, bias_gradient)


def _plan(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, options: Options, spec: Spec,
    repair: Callable[..., Callable[..., None]], bias_gradient: Callable[..., Tensor],
) -> Backward:  # fmt: skip
    """The backward of tensors like these; without do, for a do of zeros that need not be multiplied. It holds no tensor.

    Where a mask, or another sequence, may hide a NaN that came through all the same, the kernels set a flag if they meet one.
    A far row (see `device.row_stats`) gives a NaN too, to its dq at least. The launch of `repair` computes everything again if
    the flag is set. A bias's gradient has a launch of its own.
    """
    sizes = sizes_of(q, k, options)
    columns = padded(spec.dim) if _accumulates_dq(spec) else 0
    stats_of = row_stats.plan(o, do, dlse, sizes, spec, check_nan=True, columns=columns)
    fill = _fill(k, v, sizes, spec, bias_kind(options))
    readable_options = options
    if options.bias is not None:
        readable_options = options._replace(bias=readable_bias(options.bias, bias_shape(sizes)))
    mend = repair(q, k, v, o if do is None else do, readable_options, spec)
    del readable_options
    new_dq, new_dk, new_dv = (empties(tuple(x.shape), grad_dtype(x, spec), x.device) for x in (q, k, v))

    def run(inputs: BackwardInputs) -> Grads:
        do, dlse, q, k, v, o, lse, options = inputs
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        bias, _, sinks, _, cu_q, cu_k, *_ = options
        # no kernel reads what stands for an absent tensor
        cu_q, cu_k = lse if cu_q is None else cu_q, lse if cu_k is None else cu_k
        bias = lse if bias is None else readable_bias(bias, bias_shape(sizes))
        stats = stats_of(o, do, lse, lse if dlse is None else dlse, cu_q)
        lists = options.block_counts, options.block_indices, options.key_counts, options.key_entries, options.block_bits
        fill(q, k, v, do, stats, dq, dk, dv, cu_q, cu_k, bias, lists)
        of_rows = stats.words, stats.rests
        others = lse if sinks is None else sinks, bias if lists[0] is None else lists
        mend(stats.nan_flag, q, k, v, do, *of_rows, dq, dk, dv, cu_q, cu_k, *others)
        dbias = bias_gradient(q, k, v, do, *of_rows, options, spec) if spec.bias_grad else None
        dsinks = None if sinks is None else sinks_gradient(sinks, lse, rest_of(stats.rests, lse), stats.rows)
        return Grads(dq, dk, dv, dbias, dsinks)

    return run


def _without_keys(stats: RowStats, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, options: Options, spec: Spec) -> Grads:
    dbias = torch.zeros_like(options.bias) if options.bias is not None and spec.bias_grad else None
    return Grads(
        *_zeros(q, k, v, spec), dbias, None if options.sinks is None else sinks_gradient(options.sinks, lse, 0.0, stats.rows)
    )


def _zeros(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> list[Tensor]:
    return [torch.zeros(x.shape, dtype=grad_dtype(x, spec), device=x.device) for x in (q, k, v)]


def _fill(k: Tensor, v: Tensor, sizes: Sizes, spec: Spec, bias_kind: BiasKind | None) -> Callable[..., None]:
    """The launches that fill dq, dk and dv.

    Head dims above 128, and whoever asks for an order of every sum, get two kernels of seven products in all, of which
    `flash_bwd_q` sums dq; the others one of five that adds dq up in memory.
    """
    device = k.device
    parts = parts_of_group(spec, sizes, device)
    padded_T = row_stats.padded_length(sizes, spec)
    if _width(spec) > 128:
        keys = _keys(sizes, parts, padded_T, spec, device)
    else:
        keys = _both(sizes, parts, padded_T, spec, device, bias_kind)
    queries = _finalize(sizes, padded_T, spec) if _accumulates_dq(spec) else _queries(sizes, padded_T, spec, device)
    # a key head's group in parts, each with sums of its own
    new_dk, new_dv = (empties((*x.shape[:-2], sizes.Hk * parts, x.shape[-1]), grad_dtype(x, spec), device) for x in (k, v))

    def fill(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: RowStats, dq: Tensor, dk: Tensor, dv: Tensor, cu_q: Tensor,
        cu_k: Tensor, bias: Tensor, lists: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        dk_parts, dv_parts = (dk, dv) if parts == 1 else (new_dk(), new_dv())
        keys(q, k, v, do, stats, dk_parts, dv_parts, cu_q, cu_k, bias, lists)
        queries(q, k, v, do, stats, dq, cu_q, cu_k)
        if parts > 1:
            for whole, each in ((dk, dk_parts), (dv, dv_parts)):
                torch.sum(each.unflatten(-2, (whole.shape[-2], parts)), -2, out=whole)

    return fill


# minimum tiles per program, so that no program has a long tile left at the end
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


def _accumulates_dq(spec: Spec) -> bool:
    """Whether dq is added up in memory, in any order."""
    return _width(spec) <= 128 and not spec.deterministic


def _both(
    sizes: Sizes, parts: int, padded_T: int, spec: Spec, device: torch.device, bias_kind: BiasKind | None
) -> Callable[..., None]:  # fmt: skip
    """The launch for dk and dv, and dq added up if there is a sum."""
    tiles, programs, tail = schedule(sizes.S, sizes.Hk * parts, 2 * WARPGROUP, sizes, device, spec)
    rows, adds = _rows_of(spec), _accumulates_dq(spec)
    numbers = (padded_T, tiles, tail, *numbers_of(spec))
    described: tuple[Describe, ...] = (rows, rows, rows, rows, _WORDS, _WORDS, dq_accumulator.descriptor, rows, rows)
    kernel = _kernel(flash_bwd, described)
    if bias_kind is not None:
        kernel = _kernel(flash_bwd_bias, (*described, partial(bias_descriptor, box=(bias_kind.rows, WARPGROUP))))
    if spec.block_size is not None:
        own = _constants_over_lists(spec, parts)
        return _over_lists(_kernel(flash_bwd_listed, described), programs, (sizes.B, *numbers), own, sizes.Hk, spec.group, device)
    own = _constants_of_both(spec, parts, adds, bias_kind)
    launch = kernel.bound((programs, 1, 1), (sizes.B, sizes.T, sizes.S, *numbers), own)
    new_unit = empties((dq_accumulator.UNIT_ROWS.value, dq_accumulator.UNIT_COLUMNS.value), torch.float32, device)

    def run(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: RowStats, dk: Tensor, dv: Tensor, cu_q: Tensor, cu_k: Tensor,
        bias: Tensor, lists: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        dq_sum = stats.dq_sum if adds else new_unit()
        if bias_kind is not None:
            described = (q, k, v, do, stats.lse, stats.delta, dq_sum, dk, dv, bias)
            launch(*described, dk, dv, stats.nan_flag, counter(device))
            return
        launch(q, k, v, do, stats.lse, stats.delta, dq_sum, dk, dv, dk, dv, stats.nan_flag, cu_q, cu_k, counter(device))

    return run


def _over_lists(
    kernel: Kernel, programs: int, numbers: tuple[Any, ...], constants: dict[str, Any], Hk: int, group: int, device: torch.device
) -> Callable[..., None]:  # fmt: skip
    """The launch for dk, dv and dq over lists of blocks, whose own sizes may change from call to call."""
    launch = cache(lambda steps: kernel.bound((programs, 1, 1), (*steps, *numbers), constants))

    def run(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: RowStats, dk: Tensor, dv: Tensor, cu_q: Tensor, cu_k: Tensor,
        bias: Tensor, lists: Sequence[Any],
    ) -> None:  # fmt: skip
        query_counts, _, counts, entries, bits = lists
        steps = (*steps_of_lists(counts, Hk, group), entries.shape[-2], *steps_of_lists(query_counts, Hk, group)[:2])
        steps = (*steps, 0 if bits is None else bits.shape[3])
        bits = counts if bits is None else bits
        described = (q, k, v, do, stats.lse, stats.delta, stats.dq_sum, dk, dv)
        launch(steps)(*described, dk, dv, stats.nan_flag, cu_q, cu_k, counts, entries, bits, counter(device))

    return run


def _finalize(sizes: Sizes, padded_T: int, spec: Spec) -> Callable[..., None]:
    """The launch that makes dq of its sum."""
    launch = dq_accumulator.finalize(spec, sizes, padded_T, check_nan=True)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: RowStats, dq: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
        launch(stats.dq_sum, dq, stats.nan_flag, cu_q)

    return run


def _keys(sizes: Sizes, parts: int, padded_T: int, spec: Spec, device: torch.device) -> Callable[..., None]:
    """The launch for dk and dv of wide heads."""
    tiles, programs, tail = schedule(sizes.S, sizes.Hk * parts, WARPGROUP, sizes, device, spec)
    rows = _rows_of(spec)
    numbers = (sizes.B, sizes.T, sizes.S, padded_T, tiles, tail, *numbers_of(spec))
    kernel = _kernel(flash_bwd_kv, (rows, rows, rows, rows, _WORDS, _WORDS, rows, rows))
    launch = kernel.bound((programs, 1, 1), numbers, _constants_of_keys(spec, parts))

    def run(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: RowStats, dk: Tensor, dv: Tensor, cu_q: Tensor, cu_k: Tensor,
        bias: Tensor, lists: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        launch(q, k, v, do, stats.lse, stats.delta, dk, dv, dk, dv, stats.nan_flag, cu_q, cu_k, counter(device))

    return run


def _queries(sizes: Sizes, padded_T: int, spec: Spec, device: torch.device) -> Callable[..., None]:
    """The launch for dq in a fixed order of the sums."""
    tiles, programs, tail = schedule(sizes.T, sizes.H, 2 * WARPGROUP, sizes, device, spec)
    numbers = (sizes.B, sizes.S, padded_T, tiles, tail, *numbers_of(spec))
    kernel = _kernel(flash_bwd_q, (_rows_of(spec),) * 5)
    launch = kernel.bound((programs, 1, 1), numbers, _constants_of_queries(spec))

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, stats: RowStats, dq: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
        launch(q, k, v, do, dq, dq, stats.nan_flag, stats.lse, stats.delta, cu_q, cu_k, counter(device))

    return run


@cache
def _kernel(function: Any, describe: tuple[Describe, ...]) -> Kernel:
    return Kernel(function, describe)


@cache
def _constants_of_both(spec: Spec, parts: int, adds: bool, bias_kind: BiasKind | None) -> dict[str, Any]:
    tile = backward_tile(spec) if bias_kind is None else biased_backward_tile(spec, bias_kind)
    return _constants(spec, parts) | {"TILE": tile} | {"ACCUMULATE_DQ": adds, "num_warps": 4}


@cache
def _constants_over_lists(spec: Spec, parts: int) -> dict[str, Any]:
    both = _constants_of_both(spec, parts, True, None)
    return {name: value for name, value in both.items() if name not in ("ACCUMULATE_DQ", "FP16")}


@cache
def _constants_of_keys(spec: Spec, parts: int) -> dict[str, Any]:
    return _constants(spec, parts) | {"TILE": backward_kv_tile(spec)} | {"num_warps": 4}


@cache
def _constants_of_queries(spec: Spec) -> dict[str, Any]:
    return _constants(spec, 0) | {"TILE": backward_q_tile(spec)} | {"num_warps": 4}


# 64 words of rows, as the kernels copy them
_WORDS = partial(line, count=WARPGROUP)


def _width(spec: Spec) -> int:
    """Columns of all rows in shared memory."""
    return padded(max(spec.dim, spec.dim_v))


@cache
def _rows_of(spec: Spec) -> Describe:
    """64 rows of a head, as every kernel here copies them: what they lack in columns comes as zeros, and is not stored."""
    return partial(descriptor, box=(1, WARPGROUP, _width(spec)))


@cache
def _constants(spec: Spec, parts: int) -> dict[str, Any]:
    """Compile-time arguments; `parts` 0: of the kernel for queries, which knows of none."""
    heads = {"GROUP": spec.group // parts, "GROUP_SPLITS": parts} if parts else {"GROUP": spec.group}
    return {"FLAGS": Flags(**flags_of(spec))} | heads | {"D": _width(spec), "FP16": spec.dtype == torch.float16}
