"""Kernels for Hopper GPUs (H100, H200) in Gluon: asynchronous copies and matrix products, warp specialisation.

    plan         what a launch needs besides its tensors
    tiles, tma   tile sizes; descriptors of the copy engine
    counters     the counters that programs draw their work tiles from
    device       what the kernels share: scheduler, pipeline, mask, softmax, the NaN fallback
    flash_fwd    the forward, of dense, packed and paged keys
    flash_bwd    the backward: row statistics, fused or as dK/dV and dQ, and the accumulator of dQ
    decode       one query per sequence with a paged cache, in bf16 and FP8
    quantised    the forward in FP8 and INT8, and the kernels that quantise

Each folder's `launch_...` starts its kernels.

Shah et al., FlashAttention-3, arXiv:2407.08608.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from rooftile.exact.backends import paged_by_gather
from rooftile.exact.paged_route import route_of
from rooftile.exact.spec import BackwardInputs, Grads, Options, Spec
from rooftile.kvcache import PagedKV
from rooftile.numerics.precision import Precision
from rooftile.numerics.recipe import QuantisedQKV
from rooftile.runtime.devices import lack_of_gluon
from rooftile.runtime.launch import device_of, on_device

NAME = "hopper"

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# head dims of queries and keys, and of values
DIMS_8BIT = ((64, 64), (128, 128), (256, 256))
# decode, one query per sequence: head dims, and the maximum number of heads that share a tile's rows
DIMS_DECODING = ((64, 64), (128, 128))
MOST_TOGETHER = 64
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))

OPTIONS = ("softcap", "bias", "sinks", "blocks")
# head dims with a bias: those whose shared memory has room for a block of it
DIMS_BIAS = ((64, 64), (96, 96), (128, 128))
# queries of a listed block are a multiple of the first, and with gradients queries and keys of the second: a tile has one list
ROWS_LISTED, ROWS_LISTED_WITH_GRAD = 64, 128


def refusals(spec: Spec) -> Iterator[str]:
    if spec.device != "sm90":
        yield f"tensors are on {spec.device}; needs sm90 (Hopper)"
    elif lack := lack_of_gluon():
        yield lack
    if spec.dtype not in DTYPES:
        yield f"{str(spec.dtype).removeprefix('torch.')}; has {', '.join(DTYPES.values())}"
    if (spec.dim, spec.dim_v) not in DIMS:
        came = f"{spec.dim}" if spec.dim == spec.dim_v else f"{spec.dim} and {spec.dim_v}"
        has = ", ".join(str(dim) if dim == dim_v else f"{dim} with values of {dim_v}" for dim, dim_v in DIMS)
        yield f"head dim {came}; has {has}"
    if spec.precision is not None:
        yield from _refusals_of_recipe(spec.precision, spec)
    yield from (f"{name}; has {' and '.join(OPTIONS)}" for name in spec.options_on if name not in OPTIONS)
    if spec.has_bias:
        yield from _refusals_of_bias(spec)
    if spec.block_size is not None:
        yield from _refusals_of_blocks(spec)
    if not spec.scale > 0:
        yield f"scale {spec.scale:g}; has positive scales"
    if len(spec.mask.chunks) > 1:
        yield f"chunk sizes {', '.join(map(str, spec.mask.chunks))} at once; has one"
    if spec.layout == "paged" and spec.queries == "any":
        yield "a paged cache with any number of queries; has one query per sequence, or many, neither deterministic"
    if spec.queries == "one":
        yield from _refusals_of_decoding(spec)
    if spec.v_order == "rows":
        yield "values quantised in rows; reads columns, which quantise_qkv(..., backend='hopper') makes"
    if spec.forward_mode:
        yield "forward-mode or second derivatives; only backend='eager' has them"


def _refusals_of_recipe(precision: Precision, spec: Spec) -> Iterator[str]:
    if precision.qk == "native" or precision.pv == "native" or precision.granularity != "block":
        yield f"precision {precision}; has 8 bits in both products, and a scale per block"
    if (spec.dim, spec.dim_v) not in DIMS_8BIT:
        has = ", ".join(str(dim) for dim, _ in DIMS_8BIT)
        yield f"head dims {spec.dim} and {spec.dim_v} with precision {precision}; has {has} with it"
    if spec.partial:
        yield f"an output in fp32 over a part of the keys with precision {precision}; has whole outputs with it"
    for name in OPTIONS:
        if name in spec.options_on:
            yield f"{name} with precision {precision}; has masks, groups and packed sequences with it"


def _refusals_of_bias(spec: Spec) -> Iterator[str]:
    if (spec.dim, spec.dim_v) not in DIMS_BIAS:
        has = ", ".join(str(dim) for dim, _ in DIMS_BIAS)
        yield f"head dims {spec.dim} and {spec.dim_v} with bias; has {has} with it"
    if spec.layout != "dense":
        yield f"bias with {spec.layout} sequences; has it with dense ones"
    if spec.softcap:
        yield "bias with softcap; has one or the other"
    if spec.deterministic and spec.needs_grad:
        yield "a deterministic backward with bias; has one or the other"


def _refusals_of_blocks(spec: Spec) -> Iterator[str]:
    assert spec.block_size is not None
    rows, keys = spec.block_size
    if rows % ROWS_LISTED:
        yield f"blocks of {rows} queries; has multiples of {ROWS_LISTED}"
    if spec.has_bias:
        yield "blocks with bias; has one or the other"
    if spec.needs_grad:
        if rows % ROWS_LISTED_WITH_GRAD or keys % ROWS_LISTED_WITH_GRAD:
            yield f"gradients over blocks of {rows} x {keys}; has them over multiples of {ROWS_LISTED_WITH_GRAD}"
        if max(spec.dim, spec.dim_v) > 128:
            yield f"gradients over blocks with head dims {spec.dim} and {spec.dim_v}; has them up to 128"
        if spec.deterministic:
            yield "a deterministic backward over blocks; has one in any order"


def _refusals_of_decoding(spec: Spec) -> Iterator[str]:
    if (spec.dim, spec.dim_v) not in DIMS_DECODING:
        has = ", ".join(str(dim) for dim, _ in DIMS_DECODING)
        yield f"head dims {spec.dim} and {spec.dim_v} with one query per sequence of a paged cache; has {has} with it"
    if spec.group > MOST_TOGETHER:
        came = f"{spec.group} query heads per key head"
        yield f"{came} with one query per sequence of a paged cache; has up to {MOST_TOGETHER} with it"
    if spec.mask.right or spec.mask.prefix is not None:
        yield f"mask {spec.mask} with one query per sequence of a paged cache; has windows to the left and chunks with it"


@cache
def _launch() -> ModuleType:
    """Imports Gluon at the first call."""
    from rooftile.exact.backends.hopper.flash_fwd import launch_forward

    return launch_forward


@cache
def _launch_decode() -> ModuleType:
    from rooftile.exact.backends.hopper.decode import launch_decode

    return launch_decode


@cache
def _launch_8bit() -> ModuleType:
    from rooftile.exact.backends.hopper.quantised import launch_8bit

    return launch_8bit


def import_kernels() -> None:
    """Imports the kernels for inference now, if possible, instead of at the first call."""
    if not lack_of_gluon():
        _launch()
        _launch_decode()


def quantise(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> QuantisedQKV:
    """The tensors of the spec's recipe, as the kernels take them."""
    with device_of(q):
        return _launch_8bit().quantise_qkv(q, k, v, options, spec)


def attend_quantised(qkv: QuantisedQKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse of what `quantise` made."""
    with device_of(qkv.q):
        return _launch_8bit().attend(qkv, spec)


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    with device_of(q):
        if spec.precision is not None:
            return _launch_8bit().forward(q, k, v, options, spec)
        return _launch().forward(q, k, v, options, spec)


def attend_paged(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse of queries to a paged cache, read in place or from a copy as `kvcache.route` says."""
    with device_of(q):
        if route_of(q, cache, readable=_launch().can_read(cache)).gather:
            return paged_by_gather.attend(_launch().forward_gathered, q, cache, options, spec, PagedKV.gathered_with_room)
        if spec.queries == "one":
            return _launch_decode().attend(q, cache, options, spec)
        return paged_by_gather.like_queries(q, *_launch().forward_paged(q, cache, options, spec))


def prepare(
    q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec
) -> Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]] | None:
    """The forward of tensors of just these shapes, strides, dtypes and device, at addresses that are multiples of 16.

    Returns None if it would have to copy one of them.
    """
    run = _launch().prepare(q, k, v, options, spec)
    return None if run is None else on_device(run, q.device)


def backward(
    inputs: BackwardInputs, spec: Spec, *, repair: Callable[..., Callable[..., None]], bias_gradient: Callable[..., Tensor]
) -> Grads:
    """`repair` sets right what a NaN behind the mask spoiled, and `bias_gradient` computes a bias's (see `dispatch.LENT`)."""
    from rooftile.exact.backends.hopper.flash_bwd import launch_backward

    with device_of(inputs.q):
        return launch_backward.backward(inputs, spec, repair, bias_gradient)


def prepare_backward(
    inputs: BackwardInputs, spec: Spec, *, repair: Callable[..., Callable[..., None]], bias_gradient: Callable[..., Tensor]
) -> Callable[[BackwardInputs], Grads] | None:
    """The backward of tensors of just these shapes, strides, dtypes and device, at addresses that are multiples of 16.

    It takes a dlse of None if and only if it is None here. Returns None if it would have to copy one of them.
    """
    from rooftile.exact.backends.hopper.flash_bwd import launch_backward

    with device_of(inputs.q):
        ready = launch_backward.prepare(inputs, spec, repair, bias_gradient)
    return None if ready is None else on_device(ready, inputs.q.device)
