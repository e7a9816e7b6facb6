"""`linear`: x times a weight: quantised, 2:4, or plain."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

import rooftile.weights.gated  # noqa: F401  (an exported program finds its operators)
from rooftile import fused
from rooftile import weights as matmul
from rooftile.errors import InvalidInput, Unsupported
from rooftile.numerics import QuantisedRows
from rooftile.runtime.explanation import Explanation
from rooftile.runtime.operators import autocast_on
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights import QuantisedWeight
from rooftile.weights import dispatch as backends
from rooftile.weights.two_four import TwoFour
from rooftile.weights.two_four.product import dispatch as sparse_backends
from rooftile.weights.two_four.product import multiply_two_four
from rooftile.weights.two_four.product.definition import CODES, Sparse, SparseProduct

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@answers_foreign_words
def linear(
    x: Tensor | QuantisedRows,  # (..., K)
    weight: QuantisedWeight | TwoFour | Tensor,  # (N, K)
    bias: Tensor | None = None,  # (N,)
    *,
    backend: str | None = None,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # (..., N)
    """Multiplies x with a weight: x W^T + bias, summed in fp32 (fp64 for float64), rounded once.

    A plain weight is multiplied by PyTorch in the dtype of x, and `out_dtype` converts that result.

    x and bias have gradients, through the dense numbers of the weight; a quantised or 2:4 weight is a constant. Formats fp8,
    fp8_tile and int8, and 2:4 weights in FP8 and INT8, quantise x, row by row.

    What is not finite changes no other row. A row of x that holds NaN gives NaN alone. So does one that holds infinity where x is
    quantised; in w8, int4, mxfp8, mxfp4 and nvfp4 it gives what the product with the dequantised weight has in IEEE arithmetic:
    infinity, or NaN where it meets a weight of zero or an infinity of the other sign.

    Args:
        x: bf16, fp16, fp32 or fp64, any strides; or `rooftile.numerics.QuantisedRows` in the format that the weight multiplies.
        weight: from `quantise_weight`, from `rooftile.sparsity.compress`, or a tensor, which is multiplied by PyTorch.
        bias: any float dtype.
        backend: "hopper", "triton", "library" (PyTorch's kernels) or "definition"; for a 2:4 weight "hopper", "triton", "library"
            (cuSPARSELt), "dense" or "definition". None takes the fastest that runs.
        deterministic: whether a row's bits may not depend on the other rows: the order of each sum follows from N and K.
        out_dtype: the dtype of the result; None takes the dtype of x.

    Raises:
        InvalidInput: shapes, dtypes or devices do not go together.
        Unsupported: the named backend does not run this product.

    Example:
        >>> weight = quantise_weight(torch.randn(256, 128), "w8")
        >>> linear(torch.randn(5, 128), weight).shape
        torch.Size([5, 256])
    """
    if not isinstance(weight, QuantisedWeight | TwoFour):
        return _plain(x, weight, bias, out_dtype, deterministic, backend)
    if isinstance(x, Tensor):
        x = _autocast(x)
    _check(x, weight, bias)
    out_dtype = _checked_dtype(out_dtype, x.dtype)
    if isinstance(weight, TwoFour):
        named = _checked(backend, sparse_backends.NAMES)
        return multiply_two_four(x, weight, bias, out_dtype=out_dtype, deterministic=deterministic, backend=named)
    named = _checked(backend, backends.NAMES)
    return matmul.multiply(x, weight, bias, out_dtype=out_dtype, deterministic=deterministic, backend=named)


def explain_linear(x: Tensor | QuantisedRows, weight: QuantisedWeight | TwoFour) -> Explanation:
    """Says which backend of `linear` runs on these, and why the others do not."""
    _check(x, weight, None)
    rows, scales = (x.codes, x.scales) if isinstance(x, QuantisedRows) else (x, None)
    rows = rows.reshape(-1, weight.shape[1])
    if isinstance(weight, TwoFour):
        sparse = Sparse(weight.values, weight.places, weight.scales)
        asked = sparse_backends.SparseProductCall(rows, scales, sparse, None, SparseProduct(*weight.shape, x.dtype, False))
        return sparse_backends.explain(asked).below(f"{tuple(x.shape)} x {weight}")
    product = matmul.definition.Product(weight.format, weight.group, *weight.shape, x.dtype, False)
    return backends.explain(backends.ProductCall(rows, scales, weight.parts, None, product)).below(f"{tuple(x.shape)} x {weight}")


def _plain(
    x: Tensor | QuantisedRows, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, fixed_order: bool,
    backend: str | None,
) -> Tensor:  # fmt: skip
    if not isinstance(weight, Tensor):
        raise InvalidInput(
            f"weight is {type(weight).__name__}; must be a tensor (N, K), or what quantise_weight or sparsity.compress returns"
        )
    if isinstance(x, QuantisedRows):
        raise InvalidInput(f"x is in {x.format} and the weight a tensor in {weight.dtype}; write x.dequantise()")
    if backend is not None:
        raise Unsupported(f"backend is {backend!r} and the weight a tensor, which PyTorch multiplies; leave backend out")
    _check(x, weight, bias)
    x, weight, bias = _autocast(x), _autocast(weight), None if bias is None else _autocast(bias)
    if x.dtype != weight.dtype:
        raise InvalidInput(f"x is {x.dtype} and the weight {weight.dtype}; must be alike: convert one of them")
    out_dtype = _checked_dtype(out_dtype, x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if fixed_order:
        rows = fused.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        y = rows.reshape(*x.shape[:-1], weight.shape[0])
    else:
        y = functional.linear(x, weight, bias)
    return y.to(out_dtype)


def _autocast(x: Tensor) -> Tensor:
    """Under autocast, as in PyTorch's linear, x comes in the dtype of autocast, but for float64."""
    if not autocast_on() or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _check(x: Tensor | QuantisedRows, weight: QuantisedWeight | TwoFour | Tensor, bias: Tensor | None) -> None:
    if not isinstance(x, QuantisedRows) and (not isinstance(x, Tensor) or x.dtype not in _FLOATS):
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInput(f"x is {what}; must be a tensor of bfloat16, float16, float32 or float64, or QuantisedRows")
    if len(weight.shape) != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        raise InvalidInput(f"x is {tuple(x.shape)} and the weight {tuple(weight.shape)}; must be (..., K) and (N, K)")
    N = weight.shape[0]
    if isinstance(x, QuantisedRows) and isinstance(weight, QuantisedWeight):
        due = matmul.weight_format(weight.format).activations
        if x.format != due:
            raise InvalidInput(f"x is in {x.format}; a weight in {weight.format} multiplies {due or '16 bits: x.dequantise()'}")
    if isinstance(x, QuantisedRows) and isinstance(weight, TwoFour) and x.format != CODES.get(weight.dtype):
        raise InvalidInput(f"x is in {x.format} and the 2:4 weight in {weight.dtype}; FP8 multiplies codes in fp8, INT8 in int8")
    if bias is not None and not isinstance(bias, Tensor):
        raise InvalidInput(f"bias is {type(bias).__name__}; must be a float tensor ({N},), or None")
    if bias is not None and (tuple(bias.shape) != (N,) or not bias.is_floating_point()):
        raise InvalidInput(f"bias is {bias.dtype} {tuple(bias.shape)}; must be float ({N},)")
    codes = x.codes if isinstance(x, QuantisedRows) else x
    for name, other in (("the weight", weight), ("bias", bias)):
        if other is not None and other.device != codes.device:
            raise InvalidInput(f"x is on {codes.device} and {name} on {other.device}; must be on one device")


def _checked_dtype(out_dtype: torch.dtype | None, default: torch.dtype) -> torch.dtype:
    if out_dtype is None:
        return default
    if out_dtype not in _FLOATS:
        raise InvalidInput(f"out_dtype is {out_dtype}; must be bfloat16, float16, float32 or float64")
    return out_dtype


def _checked(backend: str | None, names: tuple[str, ...]) -> str:
    if backend is not None and backend not in names:
        raise InvalidInput(f"backend is {backend!r}; must be one of {', '.join(names)}, or None")
    return backend or ""
