"""The checks of arguments that several methods share: from what a caller gives to tensors, flags and numbers, or one sentence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import validate as checks
from rooftile.exact.masks import CAUSAL, FULL, Mask
from rooftile.exact.validate import DENSE, PACKED
from rooftile.runtime.arguments import check_number, shown
from rooftile.runtime.operators import wants_grad
from rooftile.runtime.tensors import autocast, check_offsets


def check_qkv(q: Any, k: Any, v: Any, cu: Any = None, shared: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors of a call, in autocast's dtype if it is on, and the offsets of packed ones on their device.

    shared: the offsets belong to tokens that several ranks hold; they are checked with the ranks.
    """
    if isinstance(q, Tensor) and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, k, v = (autocast(x) for x in (q, k, v))
    checks.check_tensors(q, k, v, DENSE if cu is None else PACKED)
    if cu is not None:
        if k.shape[0] != q.shape[0]:
            raise InvalidInput(f"k has {k.shape[0]} tokens; q has {q.shape[0]}, and packed sequences share their offsets cu")
        cu = cu if shared else check_offsets("cu", cu, q.shape[0], "tokens", q.device, False)
    return q, k, v, cu


def is_causal(method: str, mask: Any, reason: str = ": its state holds the sum over all keys so far") -> bool:
    """Whether the mask is CAUSAL, for a method that has this mask and FULL; a refusal of others ends with the reason."""
    if mask is None or mask == FULL:
        return False
    if mask == CAUSAL:
        return True
    if not isinstance(mask, Mask):
        raise InvalidInput(f"mask is {shown(mask)}; must be rooftile.FULL or rooftile.CAUSAL")
    raise InvalidInput(f"mask is {mask}; {method} has FULL and CAUSAL{reason}")


def check_causal_lengths(method: str, q: Tensor, k: Tensor) -> None:
    """Raises InvalidInput unless there are as many queries as keys."""
    if q.shape[-3] != k.shape[-3]:
        raise InvalidInput(
            f"k has length {k.shape[-3]}; q has {q.shape[-3]}, and under CAUSAL they must agree: {method} takes others as state="
        )


def check_scale(value: Any, dim: int) -> float:
    """The factor of the scores: 1 / sqrt(dim) if None."""
    return float(dim**-0.5) if value is None else check_number("scale", value)


def check_states(state: Any, shapes: dict[str, tuple[int, ...]], like: Tensor) -> tuple[Tensor, ...]:
    """The tensors of a state: of these shapes, in fp32 (fp64 for fp64 inputs), on the device of `like`."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if not isinstance(state, (tuple, list)) or len(state) != len(shapes):
        came = f"a {type(state).__name__} of {len(state)}" if isinstance(state, (tuple, list)) else shown(state)
        raise InvalidInput(
            f"state is {came}; must be the tensors ({', '.join(shapes)}) that the function with _with_state returns"
        )
    for (name, shape), x in zip(shapes.items(), state, strict=True):
        fits = isinstance(x, Tensor) and x.dtype == dtype and x.ndim == len(shape)
        if not fits or any(a != b for a, b in zip(x.shape, shape, strict=True)):
            raise InvalidInput(f"{name} of state is {shown(x)}; must be a {dtype} tensor {shape}, for inputs in {like.dtype}")
        if x.device != like.device:
            raise InvalidInput(f"{name} of state is on {x.device}; q is on {like.device}, and all inputs must be on one device")
    return tuple(state)


def check_one_token(q: Tensor, k: Tensor, method: str) -> None:
    """Raises InvalidInput unless a step of decoding with a method came with one token of each sequence."""
    if q.shape[1] != 1 or k.shape[1] != 1:
        raise InvalidInput(
            f"q has length {q.shape[1]} and k has {k.shape[1]}; a step takes one token: write {method}(..., state=)"
        )


def check_no_gradient(method: str, *inputs: Tensor) -> None:
    """Raises Unsupported if an input of a step of decoding with a method requires a gradient."""
    if wants_grad(*inputs):
        raise Unsupported(
            f"{method}_step has no gradient, and an input requires one: call it under torch.no_grad(), or write "
            f"{method}(..., state=)"
        )
