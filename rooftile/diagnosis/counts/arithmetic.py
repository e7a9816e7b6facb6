"""Arithmetic of one call of an operator: FLOPs, and special functions apart.

Products and convolutions count exactly, two FLOPs for a multiply and an add, by `torch.utils.flop_counter` where it has a rule.
Pointwise operators and reductions count by a table. Divisions, roots, exponentials and the like have units of their own, and are
counted as `special`. An operator without a rule is None, never 0: so is a series whose length depends on its numbers, as
igamma's does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from rooftile.cost import counts as ours
from rooftile.diagnosis.counts.traffic import base_name, bound, elements, names, tensors


class Arithmetic(NamedTuple):
    """FLOPs and special functions of one call."""

    flops: int
    special: int


class Per(NamedTuple):
    """FLOPs and special functions per element: of the result, or of the largest input for a reduction."""

    flops: int
    special: int = 0


# they move, fill, compare shapes or draw random numbers, and compute nothing
MOVING = frozenset(
    names(
        """_to_copy clone copy copy_ cat stack fill fill_ zero_ zeros zeros_like ones ones_like full full_like new_zeros new_ones
        new_full new_empty empty empty_like empty_strided new_empty_strided arange scalar_tensor lift_fresh lift_fresh_copy
        contiguous embedding index index_select index_put index_put_ _index_put_impl_ _unsafe_index gather scatter scatter_
        select_backward slice_backward select_scatter slice_scatter constant_pad_nd pad roll flip repeat tril triu where
        masked_fill masked_fill_ masked_select nonzero sort topk argsort unique _unique2 one_hot normal_ uniform_ bernoulli_
        bernoulli random_ randn rand randint randperm randn_like rand_like randint_like normal multinomial exponential_
        _local_scalar_dense item is_nonzero expand_copy permute_copy im2col col2im unfold_backward as_strided_scatter resize_
        split_with_sizes_copy _foreach_zero_ _foreach_copy_ _pin_memory _assert_async _assert_scalar index_copy_ index_fill_
        index_copy tril_indices triu_indices eye linspace meshgrid masked_scatter masked_scatter_backward searchsorted
        bucketize _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward all_gather_copy_in chunk_cat"""
    )
)

POINTWISE: dict[str, Per] = {
    **dict.fromkeys(
        names(
            """add sub mul neg abs sign maximum minimum clamp clamp_min clamp_max relu rsub eq ne lt le gt ge logical_and
        logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor isnan isinf isfinite square floor ceil
        round trunc threshold_backward cumsum fmod remainder floor_divide heaviside lerp_scalar hardtanh isin bitwise_left_shift
        bitwise_right_shift __and__ __or__ __lshift__ __rshift__ isneginf isposinf positive signbit dropout"""
        ),
        Per(1),
    ),
    **dict.fromkeys(["addcmul", "lerp", "leaky_relu", "hardsigmoid", "hardswish", "native_dropout_backward", "prelu"], Per(2)),
    **dict.fromkeys(
        names(
            """div exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan tanh asin acos atan atan2 sinh cosh erf
        erfc erfinv pow lgamma digamma polar i0 special_i0e special_i1 special_i1e"""
        ),
        Per(0, 1),
    ),
    "native_dropout": Per(2),
    "addcdiv": Per(2, 1),
    "sigmoid": Per(1, 2),
    "logit": Per(1, 2),
    "silu": Per(2, 2),
    "mish": Per(3, 3),
    "softplus": Per(1, 2),
    "gelu": Per(8, 1),
    "elu": Per(2, 1),
    "tanh_backward": Per(3),
    "sigmoid_backward": Per(3),
    "silu_backward": Per(5, 2),
    "gelu_backward": Per(14, 2),
    "elu_backward": Per(3, 1),
    "hardswish_backward": Per(3),
    "leaky_relu_backward": Per(2),
    "mse_loss_backward": Per(3),
    "complex": Per(0),
    "view_as_real_copy": Per(0),
    "angle": Per(0, 1),
    "log_sigmoid_forward": Per(2, 2),
    "log_sigmoid_backward": Per(3, 1),
}

# per element of the largest input
REDUCING: dict[str, Per] = {
    **dict.fromkeys(names(
        """sum mean max min amax amin argmax argmin any all prod nansum aminmax"""
    ), Per(1)),
    "var": Per(3), "var_mean": Per(3), "std": Per(3), "norm": Per(2), "linalg_vector_norm": Per(2), "logsumexp": Per(2, 1),
    "_softmax": Per(3, 2), "_log_softmax": Per(3, 1), "_safe_softmax": Per(3, 2),
    "_softmax_backward_data": Per(4), "_log_softmax_backward_data": Per(3, 1),
    "native_layer_norm": Per(8), "native_layer_norm_backward": Per(15), "_fused_rms_norm": Per(4),
    "_fused_rms_norm_backward": Per(10),
    "native_group_norm": Per(8), "native_group_norm_backward": Per(15),
    "native_batch_norm": Per(8), "native_batch_norm_backward": Per(15), "_native_batch_norm_legit": Per(8),
    "_native_batch_norm_legit_no_training": Per(4), "cudnn_batch_norm": Per(8), "cudnn_batch_norm_backward": Per(15),
    "batch_norm_backward": Per(15), "_batch_norm_with_update": Per(8),
    "nll_loss_forward": Per(0), "nll_loss_backward": Per(0), "nll_loss2d_forward": Per(0), "nll_loss2d_backward": Per(0),
    "mse_loss": Per(3), "binary_cross_entropy": Per(4, 2), "binary_cross_entropy_backward": Per(4, 1),
    "embedding_dense_backward": Per(1), "scatter_add_": Per(1), "scatter_add": Per(1), "index_add_": Per(1), "index_add": Per(1),
    "max_pool2d_with_indices": Per(1), "max_pool2d_with_indices_backward": Per(1),
    "avg_pool2d": Per(1), "avg_pool2d_backward": Per(1),
    "_adaptive_avg_pool2d": Per(1), "_adaptive_avg_pool2d_backward": Per(1), "adaptive_max_pool2d": Per(1),
    "upsample_nearest2d": Per(0), "upsample_bilinear2d": Per(8), "upsample_bicubic2d": Per(32), "cumprod": Per(1),
    "bincount": Per(1), "_foreach_norm": Per(2), "_thnn_fused_lstm_cell": Per(12, 6), "count_nonzero": Per(1),
    "_amp_foreach_non_finite_check_and_unscale_": Per(2), "equal": Per(1), "isclose": Per(4), "dist": Per(3), "dot": Per(2),
    "vdot": Per(2), "linalg_cross": Per(5),
}  # fmt: skip

# per element of a parameter: moments, bias correction, the update
OPTIMISERS: dict[str, Per] = {
    "_fused_adam_": Per(12, 2), "_fused_adamw_": Per(13, 2), "_fused_sgd_": Per(4), "_fused_adagrad_": Per(4, 2),
}  # fmt: skip


# layers of a library that run over a whole sequence
RECURRENT = frozenset(names("mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward"))


def arithmetic(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Arithmetic | None:
    """The arithmetic of one call; None where no rule counts it."""
    name = base_name(func)
    if func.namespace == "rooftile":
        return _of_this_package(func, args, kwargs, result)
    if name.startswith("_scaled_dot_product"):
        return _sdpa(name, bound(func, args, kwargs))
    if func._overloadpacket in flop_registry:
        return Arithmetic(int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)), 0)
    if name in RECURRENT:
        return _recurrent(name, bound(func, args, kwargs))
    if name in ("mv", "addmv", "addmv_"):
        matrix = args[0] if name == "mv" else args[1]
        return Arithmetic(2 * matrix.numel(), 0)
    if name in MOVING:
        return Arithmetic(0, 0)
    each = name.removeprefix("_foreach_")
    each = each.removesuffix("_") if each.rstrip("_") else each
    if name.startswith("_foreach_") and each in POINTWISE:
        first = bound(func, args, kwargs)["self"]
        return _scaled(POINTWISE[each], sum(x.numel() for x in tensors(first)))
    if each == "pow" and args[-1] == 2:
        each = "square"
    if each in POINTWISE:
        made = max((x.numel() for x in tensors(result)), default=0) or max((x.numel() for x in tensors(args)), default=0)
        return _scaled(POINTWISE[each], made)
    if name in OPTIMISERS:
        return _scaled(OPTIMISERS[name], sum(x.numel() for x in tensors(bound(func, args, kwargs)["self"])))
    if name in REDUCING or each in REDUCING:
        per = REDUCING.get(name) or REDUCING[each]
        return _scaled(per, max((elements(x) for x in tensors((args, kwargs))), default=0))
    return None


def _recurrent(name: str, given: dict[str, Any]) -> Arithmetic:
    """Each token meets every matrix of weights once, and twice more in the backward; gates are small beside them."""
    x = given["input"]
    tokens = x.numel() // x.shape[-1] if x.ndim else 0
    weights = sum(w.numel() for word, value in given.items() if "weight" in word for w in tensors(value) if w.ndim == 2)
    return Arithmetic(2 * tokens * weights * (2 if name.endswith("backward") else 1), 0)


def _scaled(per: Per, count: int) -> Arithmetic:
    return Arithmetic(per.flops * count, per.special * count)


def _of_this_package(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Arithmetic | None:
    name = base_name(func)
    if name not in ours.COUNTED:
        return None
    return Arithmetic(ours.work(name, tuple(bound(func, args, kwargs).values()), result).flops, 0)


def _sdpa(name: str, given: dict[str, Any]) -> Arithmetic:
    """The convention of `rooftile.cost`: visible pairs, and a backward of 2.5 times the forward."""
    q, k, v = given["query"], given["key"], given["value"]
    T, S, D, Dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    pairs = T * S
    if given.get("is_causal"):
        # aligned at the first query and key
        pairs = sum(min(t + 1, S) for t in range(T))
    pairs *= q.numel() // (T * D) if q.numel() else 0
    forward = 2 * (D + Dv) * pairs
    return Arithmetic(forward * 5 // 2 if "backward" in name else forward, pairs)


def dtype_name(given: Any) -> str:
    """The dtype of the largest floating-point tensor, in short; "" without one."""
    short = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
    floating = [x for x in tensors(given) if isinstance(x, Tensor) and x.is_floating_point()]
    if not floating:
        return ""
    largest = max(floating, key=lambda x: x.numel())
    return short.get(largest.dtype, str(largest.dtype).removeprefix("torch."))
