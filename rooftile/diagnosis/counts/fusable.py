"""Operators that a compiler can put into the pass of another one over the same elements."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from rooftile.diagnosis.counts.traffic import base_name, bound, names

# pointwise, and PyTorch has no tag for it; a compiler writes `cat`, gathers and padding as a choice of their inputs
POINTWISE = frozenset(
    names(
        """_to_copy copy_ native_dropout bernoulli_ bernoulli fill_ zero_ ones_like zeros_like full_like cat stack rsub
        ones zeros full arange scalar_tensor new_ones new_zeros new_full embedding index_select index _unsafe_index gather
        nll_loss_backward slice_backward select_backward constant_pad_nd tril triu repeat flip roll"""
    )
)
# reductions of the last axis: a kernel that has a row in its registers can end or begin with them
OF_ROWS = frozenset(
    names(
        """_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm
        native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward"""
    )
)
# the gradients of their weights are sums over rows, for which a compiler reads what they read in a pass of its own
AND_OF_COLUMNS = frozenset(names("native_layer_norm_backward _fused_rms_norm_backward"))
# a compiler writes these as its own reductions, which begin or end with pointwise work: in training one pass for the sums over a
# channel, and one for the result. cuDNN's kernels are far from the copy rate (h200-diagnosis.jsonl, convnet)
OF_CHANNELS = frozenset(
    names(
        """native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward _batch_norm_with_update
        batch_norm_backward"""
    )
)
OF_A_DIMENSION = frozenset(names("sum mean amax amin var var_mean"))
# their result needs all of what they read: a kernel can end with them, and no kernel can go on with it
OF_ALL = frozenset(names("sum mean nll_loss_forward mse_loss linalg_vector_norm embedding_dense_backward"))


class Fusing(NamedTuple):
    """How a compiler can put a call into one kernel with others."""

    joins: bool = False  # the kernel goes through it, or ends with it
    ends: bool = False  # nothing in the kernel can read its result
    passes: int = 1  # over what it reads
    draws: bool = False  # random numbers: another run gives others
    anew: bool = False  # the compiler's own kernel takes the place of a library's


def fusing(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fusing:
    """Returns how a call can be fused: pointwise work, norms, reductions of the last axis or of all."""
    name = base_name(func)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if torch.Tag.pointwise in func.tags or (func.namespace == "aten" and name in POINTWISE):
        return Fusing(joins=True, draws=draws)
    if func.namespace != "aten":
        return Fusing()
    given = bound(func, args, kwargs)
    if name in OF_CHANNELS:
        trains = given.get("training", given.get("train", given.get("update", True)))
        return Fusing(joins=True, passes=2 if trains else 1, anew=True)
    if name in OF_ROWS:
        is_last = "dim" not in given or _is_last(given["dim"], given.get("self", given.get("grad_output")))
        return Fusing(joins=is_last, passes=2 if name in AND_OF_COLUMNS else 1)
    if name in OF_A_DIMENSION and given.get("dim") and _is_last(given["dim"], given["self"]):
        return Fusing(joins=True)
    is_of_all = name in OF_ALL and not given.get("dim")
    return Fusing(joins=is_of_all, ends=is_of_all)


def _is_last(dim: Any, x: Any) -> bool:
    axes = list(dim) if isinstance(dim, list | tuple) else [dim]
    return isinstance(x, Tensor) and [axis % max(x.ndim, 1) for axis in axes] == [x.ndim - 1]
