"""The causal convolution in front of a recurrence: each channel by itself, over the last K tokens.

The tail that goes from one call to the next is the last K - 1 *inputs*; a call with fewer tokens keeps older ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recurrent.arguments import (
    BACKENDS,
    check_dtypes,
    check_rows,
    check_shapes,
    check_state,
    narrowed,
)  # fmt: skip
from rooftile.recurrent.operator import Operators
from rooftile.recurrent.rule import Given, Rule, wide_dtype
from rooftile.recurrent.split.carries import Shift
from rooftile.recurrent.split.context import follows_context
from rooftile.recurrent.split.part import placed
from rooftile.recurrent.words import CONVOLUTION
from rooftile.runtime.arguments import check_backend, check_flag, shown
from rooftile.runtime.words import answers_with


@follows_context("x")
@answers_with(CONVOLUTION)
def causal_conv(
    x: Tensor,  # (B, T, W)
    weight: Tensor,  # (W, K)
    bias: Tensor | None = None,  # (W,)
    *,
    activation: str | None = "silu",
    tail: Tensor | None = None,  # (B, W, K - 1)
    return_tail: bool = True,
    cu: Tensor | None = None,
    group: Any = None,
    validate: bool = False,
    backend: str | None = None,
) -> Any:
    """A depthwise causal convolution: y_t = act(bias + sum over k of weight[:, k] x_{t - K + 1 + k}).

    Sums are in fp32, or in fp64 for float64 tensors.

    Args:
        x: inputs (B, T, W), float32, bfloat16, float16 or float64, any strides; with cu (total, W).
        weight: (W, K), in the dtype of x or in float32; the last of the K is multiplied by the token itself.
        bias: (W,), as the weight.
        activation: "silu" (also "swish"), or None.
        tail: the K - 1 inputs before the first token (B, W, K - 1), oldest first, in the dtype of x; None for zeros. Gradients
            flow to it.
        return_tail: whether the last K - 1 inputs are returned, too.
        cu: offsets (B + 1,), int32, of packed sequences; no output of one reads an input of another.
        group: a process group or a one-dimensional DeviceMesh whose ranks hold the sequence, each a contiguous range of any
            length. Tensors of tokens are then this rank's, cu has the whole pack's offsets, and states are the same on every
            rank. The gradients of what all ranks hold, the first state too, are this rank's share: their sum is the whole.
        validate: with a group: check over it that every rank was given the same problem; costs a small all-gather. Where one
            rank refuses its arguments, all ranks raise.
        backend: "triton" (kernels), "tiled", "eager" (with gradients of gradients), or None or "auto" for the fastest that runs.

    Returns:
        y (B, T, W) in the dtype of x; with return_tail (y, tail), tail (B, W, K - 1) in the dtype of x. Gradients flow from both.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.

    Example:
        >>> y, tail = causal_conv(torch.randn(2, 50, 96), torch.randn(96, 4), torch.randn(96))
        >>> y.shape, tail.shape
        (torch.Size([2, 50, 96]), torch.Size([2, 96, 3]))
    """
    (x,) = narrowed(x)
    front = "B T" if cu is None else "total"
    sizes = _checked(x, weight, bias, front)
    keeps = check_flag("return_tail", return_tail)
    check_flag("validate", validate)
    part, cu = placed("causal_conv", group, cu, x)
    count = sizes["B"] if cu is None else cu.shape[0] - 1
    tail = check_state(tail, "tail", (count, sizes["W"], sizes["K"] - 1), x.dtype, x)
    y, last = OPERATORS((x,), (weight, bias), tail, cu, (_activates(activation),), check_backend(backend, BACKENDS), part, keeps)
    return (y, last) if keeps else y


@answers_with(CONVOLUTION)
def conv_step(
    tail: Tensor,  # (rows, W, K - 1)
    x: Tensor,  # (S, W)
    weight: Tensor,  # (W, K)
    bias: Tensor | None = None,  # (W,)
    *,
    activation: str | None = "silu",
    slots: Tensor | None = None,  # (S,)
) -> Tensor:
    """Reads one token of each of S sequences as `causal_conv` does, and changes their tails in place.

    Args:
        tail: tails (rows, W, K - 1), oldest input first.
        x, weight, bias, activation: as in `causal_conv`, without the axis of tokens.
        slots: the row of each sequence's tail, int32 or int64; None for row n of sequence n. Tokens that share a row, such
            as padding, leave numbers of any of their states in it.

    Returns:
        y (S, W) in the dtype of x. It has no gradient.

    Example:
        >>> tail = torch.zeros(4, 96, 3)
        >>> conv_step(tail, torch.randn(2, 96), torch.randn(96, 4), slots=torch.tensor([3, 0])).shape
        torch.Size([2, 96])
    """
    (x,) = narrowed(x)
    sizes = _checked(x, weight, bias, "S")
    sizes["K - 1"] = sizes["K"] - 1
    if not isinstance(tail, Tensor) or tail.ndim != 3 or tail.shape[-1] != sizes["K - 1"]:
        raise InvalidInput(f"tail is {shown(tail)}; must be (rows, {sizes['W']}, {sizes['K - 1']})")
    slots = check_rows(tail, "tail", "rows W K'", slots, sizes)
    return OPERATORS.one(tail, (x,), (weight, bias), slots, (_activates(activation),))


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, front: str) -> dict[str, int]:
    shapes: dict[str, tuple[Any, str]] = {"x": (x, f"{front} W"), "weight": (weight, "W K")}
    if bias is not None:
        shapes["bias"] = bias, "W"
    sizes = check_shapes(shapes, {})
    if sizes["K"] < 1:
        raise InvalidInput(f"weight is {tuple(weight.shape)}; must have at least 1 number for each channel")
    check_dtypes(x, {}, {"weight": weight, "bias": bias})
    return sizes


def _activates(activation: Any) -> bool:
    if activation not in (None, "silu", "swish"):
        raise InvalidInput(f"activation is {shown(activation)}; must be 'silu' or None")
    return activation is not None


def _piece(tokens: Given, constants: Given, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    (x,), (weight, bias) = tokens, constants
    wide, K = wide_dtype(x), weight.shape[1]
    # (B, W, K - 1 + c): the inputs that some output reads
    inputs = torch.cat((state, x.transpose(1, 2).to(state.dtype)), 2)
    windows = inputs.to(wide).unfold(2, K, 1)
    y = (windows * weight.to(wide)[:, None]).sum(-1)
    y = y if bias is None else y + bias.to(wide)[:, None]
    y = F.silu(y) if options[0] else y
    return y.transpose(1, 2), inputs[..., inputs.shape[2] - (K - 1) :]


def _token(tokens: Given, constants: Given, state: Tensor, options: Given) -> tuple[Tensor, Tensor]:
    (x,), (weight, bias) = tokens, constants
    wide = wide_dtype(x)
    inputs = torch.cat((state, x[..., None].to(state.dtype)), 2)
    y = (inputs.to(wide) * weight.to(wide)).sum(-1)
    y = y if bias is None else y + bias.to(wide)
    return F.silu(y) if options[0] else y, inputs[..., 1:]


OPERATORS = Operators(
    Rule(
        name="causal_conv",
        tokens=("x",),
        constants=("weight", "bias?"),
        options=("bool silu",),
        token=_token,
        piece=_piece,
        length=256,
        kernels="rooftile.recurrent.kernels.convolution",
        carry=Shift(),
    )
)  # fmt: skip
