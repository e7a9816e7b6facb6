"""Rows of activations in FP8 or INT8, each with its own scales, for products with quantised weights.

NaN and infinity stay in their row: a row of INT8 that holds one has the scale NaN, and FP8 has a code for NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.numerics.formats import FP8_E4M3, INT8, encode
from rooftile.numerics.scaling import BLOCK, scales_of, set_aside
from rooftile.runtime.devices import capability, runs_kernels
from rooftile.runtime.operators import call, define, replaced
from rooftile.runtime.words import answers_foreign_words

# numbers of a row that the kernel quantises at once
LONGEST_ROW = 1 << 16
ROW_FORMATS = {"fp8": FP8_E4M3, "fp8_tile": FP8_E4M3, "int8": INT8}


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedRows:
    """Activations (..., K) as `quantise_rows` makes them; `rooftile.linear` takes them as x.

    Args:
        codes: (..., K), float8_e4m3fn or int8.
        scales: fp32 (..., 1), or (..., K / 128) for fp8_tile, rounded up.
        format: fp8, fp8_tile or int8.
        dtype: the dtype of the activations before.
    """

    codes: Tensor
    scales: Tensor
    format: str
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the codes."""
        return self.codes.shape

    def dequantise(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns codes times scales, in the dtype of before if none is given."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scales = self.scales.to(wide)
        if self.format == "fp8_tile":
            scales = scales.repeat_interleave(BLOCK, dim=-1)[..., : self.codes.shape[-1]]
        return (self.codes.to(wide) * scales).to(dtype or self.dtype)


def as_rows(x: Tensor) -> Tensor:
    """Returns x (..., size) as (rows, size), also where the size is 0."""
    return x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)


@answers_foreign_words
def quantise_rows(x: Tensor, format: str = "fp8", *, scale: Tensor | float | None = None) -> QuantisedRows:
    """Quantises each row of activations; computed in fp32.

    Args:
        x: (..., K), float.
        format: "fp8" (e4m3, a scale per row), "fp8_tile" (e4m3, a scale for 128 numbers of a row), "int8" (a scale per row).
        scale: fp8: one scale for all rows, which was found before: a number, or a tensor of one on the device of x. Numbers that
            are too large saturate.

    Raises:
        InvalidInput: x is not such a tensor, or the format does not exist.

    Example:
        >>> quantise_rows(torch.randn(3, 256), "fp8_tile").scales.shape
        torch.Size([3, 2])
    """
    if format not in ROW_FORMATS:
        raise InvalidInput(f"format is {format!r}; must be one of {', '.join(ROW_FORMATS)}")
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim:
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InvalidInput(f"x is {what}; must be a float tensor (..., K)")
    if scale is not None and not isinstance(scale, Tensor):
        scale = torch.tensor(float(scale), device=x.device)
    if scale is not None and (format != "fp8" or scale.numel() != 1):
        raise InvalidInput(f"scale has {scale.numel()} numbers and format {format!r}; fp8 takes one for all rows")
    codes, scales = call(_QUANTISE_ROWS, _run, as_rows(x.detach()), format, scale)
    return QuantisedRows(codes.view(x.shape), scales.view(*x.shape[:-1], scales.shape[-1]), format, x.dtype)


def rounded_rows(x: Tensor, format: str) -> Tensor:
    """Returns the numbers that `quantise_rows(x, format)` stands for, in the dtype of x: on a GPU in one pass, without codes."""
    rows = as_rows(x.detach())
    if replaced(rows) or torch.compiler.is_compiling() or not _kernel_runs_on(rows, format):
        return quantise_rows(x, format).dequantise()
    from rooftile.numerics import row_kernels

    return row_kernels.rounded(rows, format).view(x.shape)


def _run(x: Tensor, format: str, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    if _kernel_runs_on(x, format):
        from rooftile.numerics import row_kernels

        return row_kernels.quantise(x, format, scale)
    codes, scales = rows_as_codes(x, format, scale)
    return codes.contiguous(), scales.contiguous()


def _kernel_runs_on(x: Tensor, format: str) -> bool:
    if x.dtype == torch.float64 or not 0 < x.shape[-1] <= LONGEST_ROW:
        return False
    if not runs_kernels(x):
        return False
    return not x.is_cuda or capability(x.device) >= ((8, 0) if format == "int8" else (8, 9))


def fake_rows(x: Tensor, format: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns empty codes and scales for the rows of x (rows, size) in a format, as an operator's fake gives them."""
    columns = -(-x.shape[-1] // BLOCK) if format == "fp8_tile" else 1
    codes = x.new_empty(x.shape, dtype=ROW_FORMATS[format].dtype)
    return codes, x.new_empty((x.shape[0], columns), dtype=torch.float32)


_QUANTISE_ROWS = define("quantise_rows(Tensor x, str format, Tensor? scale) -> (Tensor, Tensor)", _run, fake_rows)


def rows_as_codes(x: Tensor, format: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of `quantise_rows`."""
    kind = ROW_FORMATS[format]
    kept = set_aside(x.float())
    if scale is not None:
        scales = scale.float().reshape(1).expand(*x.shape[:-1], 1).contiguous()
        return encode(kept / scales, kind), scales
    size = kept.abs().nan_to_num(nan=0.0)
    if format == "fp8_tile":
        blocks = torch.nn.functional.pad(size, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        scales, inverse = scales_of(_largest(blocks), kind)
        return encode(kept * inverse.repeat_interleave(BLOCK, dim=-1)[..., : x.shape[-1]], kind), scales
    scales, inverse = scales_of(_largest(size).unsqueeze(-1), kind)
    codes = encode(kept * inverse, kind)
    if kind.is_integer:
        scales = scales.masked_fill(kept.isnan().any(-1, keepdim=True), torch.nan)
    return codes, scales


def _largest(size: Tensor) -> Tensor:
    return size.amax(-1) if size.shape[-1] else size.sum(-1)
