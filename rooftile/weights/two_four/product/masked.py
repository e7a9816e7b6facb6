"""x times a masked weight that is trained: dense memory, and sparse products where cuSPARSELt runs them and they pay.

W' is the weight with zeros where its mask leaves it out, and dY the gradient of the result:

    y = x W'^T      dX = dY W'      dW' = dY^T X

y is a sparse product, of many rows. dX is one where the mask is transposable, because the transposed W' is 2:4 then. dW' is
dense: it is the gradient of all places, and the caller decides which of them it passes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rooftile.errors import Unsupported
from rooftile.runtime.operators import below_autograd, define, watched
from rooftile.weights.two_four.product import cusparselt
from rooftile.weights.two_four.product.definition import multiply_dense

# Rows of x from which a sparse product pays. Its weight is compressed anew in each step, which takes cuSPARSELt 33 ps per number
# on an H100 (h100-sparsity.jsonl, pack). A dense product takes 2.6 fs per number and row of x, of which a sparse one saves 26 to
# 32 %: 33 ps are saved from 40,000 to 49,000 rows. Both grow with the size of the weight, so rows decide.
PAYS = 49152


def multiply_masked(x: Tensor, w: Tensor, bias: Tensor | None, *, transposable: bool) -> Tensor:
    """Returns x (..., K) times w (N, K), which is 2:4 with its zeros in place, plus the bias, with gradients for all three.

    transposable: whether the transposed w is 2:4, too.
    """
    if torch.compiler.is_compiling():
        found: Tensor = linear_masked(x, w, bias, transposable)
        return found
    made: Tensor = _MaskedProduct.apply(x, w, bias, transposable)
    return made


def run(x: Tensor, w: Tensor, bias: Tensor | None, transposable: bool) -> Tensor:
    """Computes `linear_masked`."""
    rows = x.reshape(-1, x.shape[-1])
    if not x.is_cuda:
        y = multiply_dense(rows, w.to(x.dtype), bias, x.dtype)
    elif takes(rows, w):
        y = cusparselt.multiply_packed(rows, torch._cslt_compress(w), None if bias is None else bias.to(x.dtype))
    else:
        y = functional.linear(rows, w.to(x.dtype), None if bias is None else bias.to(x.dtype))
    # no view, as nn.Linear returns none: FSDP puts its hooks on a layer's result
    made: Tensor = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w.shape[0]))
    return made


def takes(rows: Tensor, w: Tensor) -> bool:
    """Whether cuSPARSELt multiplies rows (M, K) with w (N, K): compressing w pays for many rows only."""
    if not rows.is_cuda or rows.dtype != w.dtype or rows.dtype not in (torch.bfloat16, torch.float16) or rows.shape[0] < PAYS:
        return False
    refused = next(cusparselt.refusals_of_shape(w.dtype, w.shape[0], w.shape[1]), "")
    return not refused and not cusparselt.lack_of_library(rows.device)


def run_backward(dy: Tensor, x: Tensor, w: Tensor, transposable: bool, needs_x: bool, needs_w: bool) -> tuple[Tensor, Tensor]:
    """Computes `linear_masked_backward`: dX and dW', empty where they are not needed."""
    dx, dw = x.new_empty(0), w.new_empty(0)
    rows = dy.reshape(-1, dy.shape[-1])
    if needs_x:
        if transposable and takes(rows, w.T):
            dx = cusparselt.multiply_packed(rows, torch._cslt_compress(w.T.contiguous())).view(x.shape)
        else:
            dx = (dy @ w.to(dy.dtype)).to(x.dtype)
    if needs_w:
        dw = (rows.T @ x.reshape(-1, x.shape[-1]).to(dy.dtype)).to(w.dtype)
    return dx, dw


def _fake(x: Tensor, w: Tensor, *others: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _fake_backward(dy: Tensor, x: Tensor, w: Tensor, transposable: bool, needs_x: bool, needs_w: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if needs_x else 0), w.new_empty(w.shape if needs_w else 0)


class _MaskedProduct(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, transposable: bool) -> Tensor:
        with below_autograd():
            return (linear_masked if watched(x, w, bias) or x.is_meta else run)(x, w, bias, transposable)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, bias, ctx.transposable = inputs
        ctx.bias = None if bias is None else bias.dtype
        ctx.save_for_backward(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_bias, _ = ctx.needs_input_grad
        run_it = linear_masked_backward if watched(dy, x, w) or x.is_meta else run_backward
        dx, dw = run_it(dy, x, w, ctx.transposable, needs_x, needs_w)
        dbias = None
        if needs_bias:
            dbias = dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(ctx.bias)
        return dx if needs_x else None, dw if needs_w else None, dbias, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *others: Any) -> tuple[Tensor, int]:
        if any(dim is not None for dim in in_dims[1:3]):
            raise Unsupported("torch.vmap maps the weights of a masked layer; map its inputs alone, or restore the model first")
        return _MaskedProduct.apply(x.movedim(in_dims[0], 0), *others), 0


linear_masked = define(
    "linear_masked(Tensor x, Tensor w, Tensor? bias, bool transposable) -> Tensor",
    run, _fake, _MaskedProduct.apply, has_gradient=(0, 1, 2),
)  # fmt: skip
linear_masked_backward = define(
    "linear_masked_backward(Tensor dy, Tensor x, Tensor w, bool transposable, bool needs_x, bool needs_w) -> (Tensor, Tensor)",
    run_backward, _fake_backward,
)  # fmt: skip
