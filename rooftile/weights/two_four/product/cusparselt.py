"""cuSPARSELt, through PyTorch: products with 2:4 weights on the sparse matrix units, for many rows.

The library has a layout of its own, which it makes from the dense weight. It is made once for a `TwoFour` and kept as long as its
values live: as many bytes again.

It has some twenty algorithms, and its default takes up to 1.5 times as long as the fastest, and 1.9 times in INT8
(h100-cusparselt.jsonl). Its own search tries all of them, and ended in an illegal instruction for one shape. So the fastest ones
stand here, for the version and the chip on which they were measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from rooftile.runtime.devices import capability, runs_kernels
from rooftile.runtime.launch import is_capturing
from rooftile.weights.two_four.compressed import two_four_dense
from rooftile.weights.two_four.product.definition import Sparse, SparseProduct, scales_of

# by dtype: N and K of the weight are multiples of it
MULTIPLES = {torch.bfloat16: 16, torch.float16: 16, torch.float8_e4m3fn: 32, torch.int8: 32}
# rows are padded to a multiple, for every dtype
ROWS = 16


class Algorithm(NamedTuple):
    """The library's number of an algorithm, and whether it writes its result (N, M) transposed, as rows of x."""

    number: int
    transposes: bool


# The library's default. It writes a transposed result slowly, so a kernel of ours transposes
DEFAULT = Algorithm(0, False)
# The fastest ones by the library's version, compute capability and dtype (`rooftile bench cusparselt`). fp16 keeps the
# default: one of its algorithms ends in an illegal instruction
FASTEST: dict[tuple[int | None, tuple[int, int], torch.dtype], Algorithm] = {
    (800, (9, 0), torch.bfloat16): Algorithm(17, True),
    (800, (9, 0), torch.float8_e4m3fn): Algorithm(21, False),
    (800, (9, 0), torch.int8): Algorithm(25, False),
}
_PACKED: Any = WeakIdKeyDictionary()
# why it does not run, by device, and whether values are int8
_TRIED: dict[tuple[torch.device, bool], str] = {}


def lack_of_library(device: torch.device, *, is_int8: bool = False) -> str:
    """Says why cuSPARSELt does not run on a device, after one small product there; nothing if it runs."""
    if (device, is_int8) not in _TRIED:
        if device.type == "cuda" and is_capturing():
            # what runs while a graph is captured has no result to look at
            return "cuSPARSELt that was not tried before this CUDA graph; needs one product outside of it"
        _TRIED[device, is_int8] = _tried(device, is_int8)
    return _TRIED[device, is_int8]


def _tried(device: torch.device, is_int8: bool) -> str:
    try:
        w = torch.eye(64, dtype=torch.int8 if is_int8 else torch.bfloat16, device=device)
        # transposed as in a product; int8 has no other order
        y = torch._cslt_sparse_mm(torch._cslt_compress(w), w.T, out_dtype=torch.int32 if is_int8 else None).to(w.dtype)
        if not torch.equal(y, w):
            return "cuSPARSELt with wrong results; needs a PyTorch whose cuSPARSELt fits its CUDA"
    # whatever stops the library is the reason: it may be missing, of another CUDA, or without this chip
    except (RuntimeError, OSError, AttributeError, NotImplementedError) as error:
        return f"cuSPARSELt does not run here ({str(error).splitlines()[0][:120]}); needs a PyTorch with cuSPARSELt for this chip"
    return ""


def refusals_of_shape(dtype: torch.dtype, N: int, K: int) -> Iterator[str]:
    """Yields why cuSPARSELt does not take a weight."""
    if dtype not in MULTIPLES:
        yield f"values in {str(dtype).removeprefix('torch.')}; has bfloat16, float16, FP8, int8"
    elif N % MULTIPLES[dtype] or K % MULTIPLES[dtype]:
        yield f"a weight {N} x {K}; has multiples of {MULTIPLES[dtype]}"


def multiply(x: Tensor, x_scales: Tensor | None, weight: Sparse, bias: Tensor | None, product: SparseProduct) -> Tensor:
    """Multiplies x (M, K), or its codes with their scales, with a weight, to (M, N)."""
    packed = packed_of(weight, product.K)
    if x_scales is None:
        return multiply_packed(x, packed, None if bias is None else bias.to(x.dtype))
    # products of int8 are exact; scales are applied by the kernel that transposes, so these algorithms do not
    y = sums(x, packed, None, torch.int32 if x.dtype == torch.int8 else torch.float32, algorithm_for(x.device, x.dtype))
    return _transposed(y, x.shape[0], x_scales, scales_of(weight), bias, product.out_dtype)


def lack_of_packed(weight: Sparse) -> str:
    """Says why a weight cannot be packed now; nothing if it can, or is."""
    if weight.values.is_cuda and is_capturing() and weight.values not in _PACKED:
        # it would be packed when the graph is replayed, and kept as if it were packed now
        return "a weight that cuSPARSELt has not packed before this CUDA graph; needs one product outside of it"
    return ""


def packed_of(weight: Sparse, K: int) -> Tensor:
    """The library's layout of a weight."""
    found: Tensor | None = _PACKED.get(weight.values)
    if found is None:
        # outside of inference mode, so that a later call outside of it may use it, too
        with torch.inference_mode(False), torch.no_grad():
            found = torch._cslt_compress(two_four_dense(weight.values, weight.places, K))
        _PACKED[weight.values] = found
    return found


def multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (M, K) times a packed weight (N, K) transposed, plus a bias in the dtype of x, to (M, N) in that dtype."""
    algorithm = algorithm_for(x.device, x.dtype)
    y = sums(x, packed, bias, None, algorithm)
    return y[: x.shape[0]] if algorithm.transposes else _transposed(y, x.shape[0], None, None, None, x.dtype)


@cache
def algorithm_for(device: torch.device, dtype: torch.dtype) -> Algorithm:
    """Returns the library's fastest algorithm for a dtype where it is known, else its default."""
    if device.type != "cuda":
        return DEFAULT
    return FASTEST.get((torch.backends.cusparselt.version(), capability(device), dtype), DEFAULT)


def sums(x: Tensor, packed: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, algorithm: Algorithm) -> Tensor:
    """The product (N, M), or transposed, with M padded. The library's first matrix is the sparse one: W x^T."""
    M, x = x.shape[0], x.contiguous()
    # bytes: FP8 has no padding
    x = functional.pad(x.view(torch.uint8), (0, 0, 0, -M % ROWS)).view(x.dtype) if M % ROWS else x
    return torch._cslt_sparse_mm(
        packed, x.T, bias=bias, out_dtype=out_dtype, transpose_result=algorithm.transposes, alg_id=algorithm.number
    )


def _transposed(
    y: Tensor, M: int, x_scales: Tensor | None, w_scales: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """The first M columns of a product (N, M) as rows, with scales and bias, rounded once."""
    if y.is_cuda and runs_kernels(y):
        from rooftile.weights.two_four.product.transposed import transposed

        return transposed(y, M, x_scales, w_scales, bias, out_dtype)
    y = y[:, :M].T
    y = y if x_scales is None or w_scales is None else y * x_scales * w_scales.T
    y = y if bias is None else y + bias.float()
    return y.to(out_dtype).contiguous()
