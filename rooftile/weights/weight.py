"""`QuantisedWeight`: the codes and scales of a weight, and the numbers that they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.numerics.formats import FP4_E2M1, decode
from rooftile.runtime.words import answers_words
from rooftile.weights.formats import TILE, WeightFormat, weight_format
from rooftile.weights.packing import OFFSET, unpack


class Parts(NamedTuple):
    """The tensors of a weight, as they cross an operator's schema."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    outer: Tensor | None


@answers_words
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class QuantisedWeight:
    """A weight (N, K) as `quantise_weight` makes it, or as a checkpoint has it, for `linear`. It is a constant: no gradient.

    Args:
        codes: (N, K) in the format's dtype; (N, K / 2) bytes for formats of 4 bits: the first code of a byte is in its low half,
            and codes of int4 have 8 added.
        scales: (N, K / group), fp32, bf16 or fp16; for fp8_tile (N / 128, K / 128), rounded up; for mxfp8 and mxfp4 uint8, the
            exponent of a power of two with 127 added; for nvfp4 float8_e4m3fn.
        zeros: int4 with zero points: int8 like scales, -8 to 7. A weight is (code - zero) * scale.
        order: int32 (K,) where columns were sorted (act-order): column k of the codes is column order[k] of the weight.
        format: the word.
        group: neighbours of a row that share a scale.
        shape: (N, K).
        outer: nvfp4: an fp32 scale for the whole weight (1, 1), or for each row (N, 1).
        input_scale: fp8: one fp32 scale for all activations, a tensor of one number; None finds a scale per token.

    Raises:
        InvalidInput: a tensor has another shape or dtype than it must have.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    format: str
    group: int
    shape: tuple[int, int]
    outer: Tensor | None = None
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        kind, (N, K) = weight_format(self.format), self.shape
        if self.group < 1 or (self.format != "fp8_tile" and K % self.group):
            raise InvalidInput(f"group is {self.group} and rows have K = {K} numbers; K must be a multiple of it")
        scales = (-(-N // TILE), -(-K // TILE)) if self.format == "fp8_tile" else (N, K // self.group)
        due = {
            "codes": ((N, -(-K // 2)) if kind.is_packed else (N, K), (kind.codes,)),
            "scales": (scales, _scale_dtypes(kind)),
            "zeros": (scales, (torch.int8,)),
            "order": ((K,), (torch.int32,)),
        }
        for name, (shape, dtypes) in due.items():
            x = getattr(self, name)
            if x is not None and (tuple(x.shape) != shape or x.dtype not in dtypes):
                words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise InvalidInput(f"{name} of {self.format} are {x.dtype} {tuple(x.shape)}; must be {words} {shape}")
        if self.zeros is not None and self.format != "int4":
            raise InvalidInput(f"zeros are given, and the format is {self.format}; only int4 has zero points")
        if (self.outer is None) == (self.format == "nvfp4"):
            raise InvalidInput(f"outer is {'missing' if self.outer is None else 'given'} for {self.format}; only nvfp4 has it")
        given = self.input_scale
        if given is not None and (self.format != "fp8" or given.numel() != 1 or not given.is_floating_point()):
            raise InvalidInput(
                f"input_scale is {given.dtype} {tuple(given.shape)} for {self.format}; must be one float, and only fp8 has it"
            )

    @property
    def parts(self) -> Parts:
        """The tensors of the weight: codes, scales, zero points, order, outer scale."""
        return Parts(self.codes, self.scales, self.zeros, self.order, self.outer)

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in (*self.parts, self.input_scale) if x is not None)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the weight (N, K): (code - zero) * scale in fp32, rounded to dtype; computed in fp64 for float64.

        Example:
            >>> quantise_weight(torch.eye(64), "mxfp4").dequantise().diagonal().unique()
            tensor([1.])
        """
        return dequantised(self.parts, self.format, self.group, self.shape, dtype)

    def to(self, device: torch.device | str) -> QuantisedWeight:
        """Returns the weight on a device."""
        others = (self.zeros, self.order, self.outer, self.input_scale)
        zeros, order, outer, given = (None if x is None else x.to(device) for x in others)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return QuantisedWeight(codes, scales, zeros, order, self.format, self.group, self.shape, outer, given)

    def __repr__(self) -> str:
        per = f", group of {self.group}" if self.group not in (self.shape[1], weight_format(self.format).group) else ""
        return f"QuantisedWeight({self.shape}, {self.format}{per}, {self.nbytes:,} bytes on {self.device})"


def _scale_dtypes(kind: WeightFormat) -> tuple[torch.dtype, ...]:
    if kind.has_exponents:
        return (torch.uint8,)
    if kind.name == "nvfp4":
        return (torch.float8_e4m3fn,)
    return (torch.float32, torch.bfloat16, torch.float16)


def rows_of(parts: Parts, format: str, start: int, stop: int) -> Parts:
    """Returns the tensors of some rows of a weight; start is a multiple of 128."""
    scales = parts.scales[start // TILE : -(-stop // TILE)] if format == "fp8_tile" else parts.scales[start:stop]
    zeros = None if parts.zeros is None else parts.zeros[start:stop]
    outer = parts.outer if parts.outer is None or parts.outer.shape[0] == 1 else parts.outer[start:stop]
    return Parts(parts.codes[start:stop], scales, zeros, parts.order, outer)


def dequantised(parts: Parts, format: str, group: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """`QuantisedWeight.dequantise` of a weight's tensors."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = centred_codes(parts, format, shape[1], group, wide)
    for scales in factors(parts, format, group, shape, wide):
        numbers = numbers * scales
    # the smallest number of a block may be nothing in 16 bits, and the largest infinite: both are what rounding gives
    numbers = numbers.to(dtype)
    if parts.order is None:
        return numbers
    return torch.empty_like(numbers).index_copy_(1, parts.order.long(), numbers)


def centred_codes(parts: Parts, format: str, K: int, group: int, wide: torch.dtype) -> Tensor:
    """Returns the numbers (N, K) that are multiplied by scales: codes decoded, less their zero points."""
    kind = weight_format(format)
    if not kind.is_packed:
        return parts.codes.to(wide)
    codes = unpack(parts.codes, K)
    if format != "int4":
        return decode(codes, FP4_E2M1).to(wide)
    numbers = codes.to(wide) - OFFSET
    return numbers if parts.zeros is None else numbers - parts.zeros.to(wide).repeat_interleave(group, dim=1)


def factors(parts: Parts, format: str, group: int, shape: tuple[int, int], wide: torch.dtype) -> list[Tensor]:
    """Returns what each number is multiplied by, in order: scales that broadcast to (N, K)."""
    N, K = shape
    if format == "fp8_tile":
        by_row = parts.scales.to(wide).repeat_interleave(TILE, dim=0)[:N]
        return [by_row.repeat_interleave(TILE, dim=1)[:, :K]]
    if weight_format(format).has_exponents:
        # two factors: the smallest power of two is subnormal in fp32, and some devices flush it to zero
        exponents = parts.scales.to(torch.int32) - 127
        half = exponents // 2
        return [_repeated(_power(part).to(wide), group, K) for part in (half, exponents - half)]
    inner = _repeated(parts.scales.to(wide), group, K)
    return [inner] if parts.outer is None else [inner, parts.outer.to(wide)]


def _power(exponent: Tensor) -> Tensor:
    """Builds 2^exponent from its bits, for normal numbers: exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def _repeated(scales: Tensor, group: int, K: int) -> Tensor:
    return scales if group == K else scales.repeat_interleave(group, dim=1)
