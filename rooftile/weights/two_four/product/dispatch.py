"""Backends of products with 2:4 weights: `hopper` and `triton` (ours, for few rows), `library` (cuSPARSELt, for many), `dense`
(the weight expanded, and PyTorch's product or our quantised one) and `definition`. Each refuses in sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import weights as matmul
from rooftile.numerics.quantised_rows import LONGEST_ROW, rows_as_codes
from rooftile.runtime.devices import INTERPRETED, capability, lack_of_triton, warn_without_triton
from rooftile.runtime.dispatch import Dispatcher
from rooftile.runtime.explanation import Explanation
from rooftile.weights.dispatch import lack_of_hopper
from rooftile.weights.two_four.compressed import two_four_dense
from rooftile.weights.two_four.product import cusparselt, definition
from rooftile.weights.two_four.product.definition import CODES, Sparse, SparseProduct, scales_of

NAMES = ("hopper", "triton", "library", "dense", "definition")
OURS = ("hopper", "triton")
# rows up to which our kernels are first: the portable one, and Hopper's, which has up to 128 rows of x in one tile
FEW, FEW_ON_HOPPER = 64, 128
FP8 = torch.float8_e4m3fn
Multiply = Callable[[Tensor, Tensor | None, Sparse, Tensor | None, SparseProduct], Tensor]


class SparseProductCall(NamedTuple):
    """All that a refusal depends on."""

    x: Tensor
    x_scales: Tensor | None
    weight: Sparse
    bias: Tensor | None
    product: SparseProduct


def run(asked: SparseProductCall, name: str) -> Tensor:
    """Multiplies by the named backend, or by the first that takes the call.

    Raises:
        Unsupported: the named one does not take it.
    """
    if not name:
        warn_without_triton(asked.x.is_cuda)
    name = DISPATCHER.select(asked, name or None)
    if asked.weight.values.dtype in CODES and asked.x_scales is None:
        codes, scales = _quantised(asked.x, CODES[asked.weight.values.dtype], name)
        asked = asked._replace(x=codes, x_scales=scales)
    return _multiply_of(name)(*asked)


def order(asked: SparseProductCall) -> tuple[str, ...]:
    """Returns the names of all backends, fastest first."""
    # its sums alone do not depend on the number of rows
    if asked.x.shape[0] <= FEW or asked.product.deterministic:
        return NAMES
    if asked.x.shape[0] <= FEW_ON_HOPPER:
        return ("hopper", "library", "dense", "triton", "definition")
    return ("library", "dense", "hopper", "triton", "definition")


def last_of_ours(device: torch.device) -> int:
    """Returns the rows up to which one of our kernels is first on a GPU."""
    return FEW_ON_HOPPER if capability(device) == (9, 0) else FEW


def refusals(name: str, asked: SparseProductCall) -> Iterator[str]:
    """Yields why a backend does not take a call: what came; what it has."""
    if name == "definition":
        return
    x, weight, product = asked.x, asked.weight, asked.product
    if not x.is_cuda and not (INTERPRETED and x.device.type == "cpu" and name == "triton"):
        yield f"tensors are on {x.device}; needs a CUDA GPU"
        return
    if torch.float64 in (x.dtype, product.out_dtype, weight.values.dtype):
        yield "float64; has 32 bits and fewer"
    if name not in OURS and product.deterministic:
        yield "deterministic; cuBLAS and cuSPARSELt choose their sums by the number of rows"
    if name in OURS:
        yield from _refusals_of_ours(asked, name)
    elif name == "library":
        yield from _library_refusals(asked)


def _refusals_of_ours(asked: SparseProductCall, name: str) -> Iterator[str]:
    x, values = asked.x, asked.weight.values
    if lack := lack_of_triton():
        yield lack
        return
    chip = capability(x.device) if x.is_cuda else (9, 0)
    least = (8, 9) if values.dtype == FP8 else (8, 0)
    if name == "hopper":
        yield from _hopper_refusals(asked, chip)
    elif chip < least:
        yield f"compute capability {chip[0]}.{chip[1]}; needs {least[0]}.{least[1]}"
    if values.dtype == torch.int8:
        yield "values in int8; has bfloat16, float16, FP8"
    yield from _refusals_of_dtypes(asked, (torch.bfloat16, torch.float16))
    if values.dtype == FP8 and asked.x_scales is None and asked.product.K > LONGEST_ROW:
        yield f"rows of {asked.product.K:,} numbers; has up to {LONGEST_ROW:,} to quantise at once"


def _hopper_refusals(asked: SparseProductCall, chip: tuple[int, int]) -> Iterator[str]:
    if lack := lack_of_hopper(chip):
        yield lack
        return
    from rooftile.weights.two_four.product import hopper

    yield from hopper.refusals(asked.x, asked.weight, asked.product)


def _library_refusals(asked: SparseProductCall) -> Iterator[str]:
    yield from _refusals_of_dtypes(asked, (torch.bfloat16, torch.float16))
    yield from cusparselt.refusals_of_shape(asked.weight.values.dtype, asked.product.N, asked.product.K)
    if asked.weight.values.dtype not in CODES and asked.product.out_dtype != asked.x.dtype:
        yield f"x in {asked.x.dtype} and results in {asked.product.out_dtype}; has one dtype for both"
    lack = cusparselt.lack_of_library(asked.x.device, is_int8=asked.weight.values.dtype == torch.int8)
    if reason := lack or cusparselt.lack_of_packed(asked.weight):
        yield reason


def _refusals_of_dtypes(asked: SparseProductCall, known: tuple[torch.dtype, ...]) -> Iterator[str]:
    x, values = asked.x.dtype, asked.weight.values.dtype
    if values in CODES:
        return
    if values not in known or x != values:
        words = [str(dtype).removeprefix("torch.") for dtype in (x, values)]
        yield f"x in {words[0]} and values in {words[1]}; has both in bfloat16 or both in float16, and FP8"


def _quantised(x: Tensor, format: str, name: str) -> tuple[Tensor, Tensor]:
    if name == "definition" or x.shape[1] > LONGEST_ROW or lack_of_triton():
        return rows_as_codes(x, format, None)
    from rooftile.numerics import row_kernels

    return row_kernels.quantise(x, format, None)


def _multiply_of(name: str) -> Multiply:
    if name == "hopper":
        from rooftile.weights.two_four.product import hopper

        return hopper.multiply
    if name == "triton":
        from rooftile.weights.two_four.product import few_rows

        return few_rows.multiply
    return {"library": cusparselt.multiply, "dense": _dense, "definition": definition.multiply}[name]


def _dense(x: Tensor, x_scales: Tensor | None, weight: Sparse, bias: Tensor | None, product: SparseProduct) -> Tensor:
    w = two_four_dense(weight.values, weight.places, product.K)
    if x_scales is not None:
        words = (CODES[w.dtype], product.K, product.N, product.K, product.out_dtype, product.deterministic, "")
        return matmul.product.run(x, x_scales, w, scales_of(weight), None, None, None, None, bias, *words)
    y = functional.linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return y.to(product.out_dtype)


DISPATCHER: Dispatcher[SparseProductCall] = Dispatcher(
    "multiply this 2:4 weight", order=order, refusals=lambda name, asked: tuple(refusals(name, asked))
)


def explain(asked: SparseProductCall) -> Explanation:
    """Says which backend takes a call, and why the faster ones do not."""
    return DISPATCHER.explain_choice(asked)
