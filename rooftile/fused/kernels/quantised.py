"""Rows in FP8 or INT8, written by the kernel that computes them: the codes and scales of `quantise_rows` of the rounded rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.numerics.quantised_rows import ROW_FORMATS
from rooftile.numerics.row_kernels import codes_of, given_codes


@triton.jit
def store_rows(y, codes_ptr, line, scales_ptr, given_ptr, there, is_row, OUT: tl.constexpr, WHOLE: tl.constexpr):
    """Quantises rows y (ROWS, WIDTH), zero outside of `there`; OUT is "fp8", "int8", or "given" for FP8 with one given scale.

    WHOLE: rows are whole accesses of 16 bytes in the dtype of y.
    """
    places = codes_ptr + line
    if WHOLE:
        # A thread writes as many codes as it read numbers. It could write 16, and then sums before would be taken in another
        # order than by a kernel that writes y: the compiler gives all tensors of a kernel the layout of its widest access
        places = tl.multiple_of(places, (1, 128 // y.dtype.primitive_bitwidth))
    y = y.to(tl.float32)
    if OUT == "given":
        given = tl.load(given_ptr)
        codes = given_codes(y, given, 448.0)
        scale = tl.full((y.shape[0],), 1.0, tl.float32) * given
    elif OUT == "int8":
        codes, scale = codes_of(y, 127.0, True)
    else:
        tl.static_assert(OUT == "fp8")
        codes, scale = codes_of(y, 448.0, False)
    tl.store(places, codes.to(codes_ptr.dtype.element_ty), mask=there)
    tl.store(scales_ptr, scale, mask=is_row)


def out_of(format: str, given: Tensor | None) -> str:
    """Returns the kernels' word for a format, "fp8" or "int8", and whether its scale is given."""
    return format if given is None else "given"


def rows_for(shape: torch.Size, format: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns memory for codes (total, size) and scales (total, 1)."""
    codes = torch.empty(shape, dtype=ROW_FORMATS[format].dtype, device=device)
    return codes, torch.empty((shape[0], 1), dtype=torch.float32, device=device)
