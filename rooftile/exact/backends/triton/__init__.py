"""Portable GPU kernels in Triton: FlashAttention-2's algorithm, forward and backward, on Ampere and newer.

    flash_fwd         o and lse
    flash_fwd_8bit    the same of tensors in FP8 and INT8
    row_stats         what the backward needs of each row
    flash_bwd_kv      dk and dv
    flash_bwd_q       dq
    flash_bwd_repair  all three once more, where another backend met a NaN
    flash_bwd_bias    the gradient of the bias, summed over what was broadcast

Every sum has one owner and one order: gradients are the same bits from run to run, at no price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from rooftile.exact.spec import BackwardInputs, Grads, Options, Spec
from rooftile.kvcache import PagedKV
from rooftile.numerics.hadamard import SHORTEST
from rooftile.numerics.precision import Precision
from rooftile.numerics.recipe import QuantisedQKV, quantise_qkv
from rooftile.runtime.devices import lack_of_kernels
from rooftile.runtime.launch import device_of, on_device

NAME = "triton"

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LARGEST_DIM = 256

OPTIONS = ("softcap", "bias", "alibi", "sinks", "dropout", "blocks")


def refusals(spec: Spec) -> Iterator[str]:
    if lack := lack_of_kernels(spec.device):
        yield lack
    if spec.dtype not in DTYPES:
        yield f"{str(spec.dtype).removeprefix('torch.')}; has {', '.join(DTYPES.values())}"
    if max(spec.dim, spec.dim_v) > LARGEST_DIM:
        yield f"head dims {spec.dim}, {spec.dim_v}; has up to {LARGEST_DIM}"
    if len(spec.mask.chunks) > 1:
        yield f"chunk sizes {', '.join(map(str, spec.mask.chunks))} at once; has one"
    if spec.precision is not None:
        yield from _refusals_of_recipe(spec.precision, spec)
    if spec.v_order == "columns":
        yield "values quantised in columns; reads rows, which quantise_qkv(..., backend='triton') makes"
    if spec.has_kv_scales and spec.device in ("sm80", "sm86", "sm87"):
        yield f"a cache in FP8 on {spec.device}; needs sm89 (Ada) or newer"
    yield from (f"{name}; has {', '.join(OPTIONS)}" for name in spec.options_on if name not in OPTIONS)
    if spec.block_size is not None and spec.bias_grad:
        yield "the gradient of a bias with blocks; only backend='eager' and 'tiled' have it"
    if spec.forward_mode:
        yield "forward-mode or second derivatives; only backend='eager' has them"


def _refusals_of_recipe(precision: Precision, spec: Spec) -> Iterator[str]:
    if "fp8" in (precision.qk, precision.pv) and spec.device in ("sm80", "sm86", "sm87"):
        yield f"precision {precision} on {spec.device}; FP8 needs sm89 (Ada) or newer"
    if spec.block_size is not None:
        yield f"blocks with precision {precision}; has masks, groups, softcap and sinks with it"
    for name in ("bias", "alibi"):
        if getattr(spec, f"has_{name}"):
            yield f"{name} with precision {precision}; has masks, groups, softcap and sinks with it"
    if spec.dropout:
        yield f"dropout with precision {precision}; has none with it"
    if precision.incoherent and precision.qk != "native" and spec.dim % SHORTEST:
        yield f"head dim {spec.dim} has no Hadamard transform; has multiples of {SHORTEST}, or Precision(incoherent=False)"


@cache
def _launchers() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Grads]]:
    """Forward and backward; imports Triton at the first call."""
    from rooftile.exact.backends.triton import flash_bwd, flash_fwd

    return flash_fwd.forward, flash_bwd.backward


def quantise(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> QuantisedQKV:
    """The tensors of the spec's recipe, by PyTorch's operations."""
    assert spec.precision is not None
    return quantise_qkv(q, k, v, spec.precision, options.cu_q, options.cu_k)


def attend_quantised(qkv: QuantisedQKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse of what `quantise` made."""
    from rooftile.exact.backends.triton import flash_fwd_8bit

    with device_of(qkv.q):
        return flash_fwd_8bit.attend(qkv, options, spec)


def attend_paged(q: Tensor, cache: PagedKV, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    """o and lse of queries to a paged cache."""
    from rooftile.exact.backends.triton import paged_decode, paged_fwd

    with device_of(q):
        if cache.cu_q is None and not spec.deterministic and paged_decode.fits(spec, q.shape[1]):
            return paged_decode.attend(q, cache, options, spec)
        return paged_fwd.attend(q, cache, options, spec)


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec) -> tuple[Tensor, Tensor]:
    if spec.precision is not None:
        with torch.autocast(q.device.type, enabled=False):
            return attend_quantised(quantise(q, k, v, options, spec), options, spec)
    with device_of(q):
        return _launchers()[0](q, k, v, options, spec)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, options: Options, spec: Spec
) -> Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]] | None:
    """The forward of tensors of just these shapes, strides, dtypes and device, at addresses that are multiples of 16.

    Returns None if it would have to copy one of them.
    """
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 or not (options.sinks is None or options.sinks.is_contiguous()):
        return None
    from rooftile.exact.backends.triton import flash_fwd
    from rooftile.exact.backends.triton.call import call_of
    from rooftile.exact.backends.triton.tiles import forward_tile

    return on_device(flash_fwd.plan(call_of(q, k, v, options, spec), forward_tile(spec)), q.device)


def backward(inputs: BackwardInputs, spec: Spec) -> Grads:
    with device_of(inputs.q):
        return _launchers()[1](inputs, spec)


def prepare_backward(inputs: BackwardInputs, spec: Spec) -> Callable[[BackwardInputs], Grads] | None:
    """The backward of tensors of just these shapes, strides, dtypes and device, at addresses that are multiples of 16.

    It takes a dlse of None if and only if it is None here. Returns None if it would have to copy one of them.
    """
    from rooftile.exact.backends.triton import flash_bwd

    ready = flash_bwd.prepare(inputs, spec)
    return None if ready is None else on_device(ready, inputs.q.device)


def repair(q: Tensor, k: Tensor, v: Tensor, do: Tensor, options: Options, spec: Spec) -> Callable[..., None]:
    """The launch that computes gradients once more, in place, if a flag is set (see `flash_bwd_repair.plan`)."""
    from rooftile.exact.backends.triton import flash_bwd_repair

    return flash_bwd_repair.plan(q, k, v, do, options, spec)


def bias_gradient(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, words: Tensor, rests: Tensor, options: Options, spec: Spec
) -> Tensor:
    """The gradient of the bias, in its shape and dtype, from the row statistics of a backward (see `device.row_stats`)."""
    from rooftile.exact.backends.triton import flash_bwd_bias

    return flash_bwd_bias.gradient(q, k, v, do, words, rests, options, spec)
