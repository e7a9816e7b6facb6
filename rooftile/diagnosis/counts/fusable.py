"""Operators that a compiler can put into the pass of another one over the same elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from rooftile.diagnosis.counts.traffic import base_name, bound, names

# pointwise, and PyTorch has no tag for it; a compiler writes `cat` as a choice of its inputs
POINTWISE = frozenset(names("_to_copy copy_ native_dropout bernoulli_ fill_ zero_ ones_like zeros_like full_like cat stack"))
# reductions of the last axis: a kernel that has a row in its registers can end or begin with them
OF_ROWS = frozenset(
    names(
        """_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm
        _fused_rms_norm"""
    )
)
# a compiler writes these as its own reductions, which begin or end with pointwise work
OF_CHANNELS = frozenset(
    names(
        """native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward _batch_norm_with_update
        batch_norm_backward"""
    )
)
OF_A_DIMENSION = frozenset(names("sum mean amax amin var var_mean"))


def is_fusable(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether one kernel can do this call and its neighbours in one pass: pointwise work, norms, reductions of the last axis."""
    name = base_name(func)
    if torch.Tag.pointwise in func.tags or name in POINTWISE or name in OF_CHANNELS:
        return True
    if func.namespace != "aten":
        return False
    given = bound(func, args, kwargs)
    if name in OF_ROWS:
        return "dim" not in given or _is_last(given["dim"], given.get("self", given.get("grad_output")))
    return name in OF_A_DIMENSION and given.get("dim") is not None and _is_last(given["dim"], given["self"])


def _is_last(dim: Any, x: Any) -> bool:
    axes = list(dim) if isinstance(dim, list | tuple) else [dim]
    return isinstance(x, Tensor) and [axis % max(x.ndim, 1) for axis in axes] == [x.ndim - 1]
