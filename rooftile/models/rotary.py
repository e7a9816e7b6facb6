"""Rotary positions: the frequencies of a configuration, and the table of their cosines and sines.

The arithmetic is in Transformers' order, to the bit: at position 100,000 an error of one ulp in a frequency rotates a query by
a hundredth of a radian.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rooftile.errors import InvalidInput

Scaling = Literal["linear", "dynamic", "llama3", "longrope", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The rotary position embedding of a model: how queries and keys rotate with their position.

    Args:
        dim: how many numbers of each head rotate, the first ones.
        theta: the base of the wavelengths.
        scaling: how wavelengths are stretched for sequences beyond the training length; None for not at all.
        factor: the factor of the stretching.
        original_len: the training length, for all of them but "linear".
        low_freq_factor, high_freq_factor: for "llama3": waves with fewer turns than the first within original_len are stretched,
            waves with more turns than the second are not, and waves between partly.
        beta_fast, beta_slow: for "yarn": waves with at least the first number of turns are not stretched, waves with at most the
            second are stretched in full.
        truncate: for "yarn": whether these bounds are rounded outwards to whole dimensions.
        short_factors, long_factors: for "longrope": the wavelength of each pair is multiplied by its factor; the first ones where
            no sequence is longer than original_len, the second ones for all positions otherwise.
        attention_factor: for "longrope" and "yarn": cosines and sines are multiplied by it.

    Raises:
        InvalidInput: a number is out of bounds, and would make frequencies that are not finite.
    """

    dim: int
    theta: float = 10_000.0
    scaling: Scaling | None = None
    factor: float = 1.0
    original_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for name, above in (("theta", 1), ("factor", 0), ("low_freq_factor", 0), ("beta_slow", 0), ("attention_factor", 0)):
            if not above < getattr(self, name) < math.inf:
                raise InvalidInput(f"rotary.{name} is {getattr(self, name)}; must be a finite number above {above}")
        if not self.low_freq_factor < self.high_freq_factor:
            factors = f"low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}"
            raise InvalidInput(f"rotary.{factors}; the first must be less")
        if not self.beta_slow <= self.beta_fast < math.inf:
            raise InvalidInput(f"rotary.beta_slow is {self.beta_slow} and beta_fast {self.beta_fast}; the first must not be more")
        if self.scaling == "dynamic" and self.dim < 4:
            raise InvalidInput(f"rotary.dim is {self.dim} with dynamic scaling; must be at least 4")
        if self.scaling == "longrope":
            self._check_factors()

    def _check_factors(self) -> None:
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if len(factors) != self.dim // 2 or not all(0 < factor < math.inf for factor in factors):
                raise InvalidInput(
                    f"rotary.{name} are {str(factors)[:60]}; must be {self.dim // 2} finite numbers above 0, one for each pair"
                )

    def frequencies(self, length: int) -> Tensor:
        """Returns the radians that each pair of numbers rotates per position, (dim / 2,) fp32.

        `length` is the longest sequence.
        """
        # always on the CPU: powers differ between devices by an ulp
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim
        wavelengths = self.theta**exponents  # over 2 pi
        plain = 1.0 / wavelengths
        match self.scaling:
            case None:
                return plain
            case "linear":
                return plain / self.factor
            case "dynamic":
                return self._dynamic(exponents, length)
            case "llama3":
                return self._llama3(plain)
            case "longrope":
                factors = self.long_factors if length > self.original_len else self.short_factors
                return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * wavelengths)
            case "yarn":
                return self._yarn(plain, 1.0 / (self.factor * wavelengths))

    def table(self, length: int, *, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        """Returns the cosines, then the sines, of all positions, (length, dim), computed in fp32."""
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = positions[:, None] * self.frequencies(length).to(positions.device)  # (length, dim / 2)
        waves = torch.cat((angles.cos(), angles.sin()), dim=1)
        return (waves * self.attention_factor).to(dtype)

    def _dynamic(self, exponents: Tensor, length: int) -> Tensor:
        """Stretches the base for the longest sequence; one of the training length or less has the plain frequencies."""
        longest = max(length, self.original_len)
        stretch = (self.factor * longest / self.original_len) - (self.factor - 1)
        return 1.0 / (self.theta * stretch ** (self.dim / (self.dim - 2))) ** exponents

    def _llama3(self, plain: Tensor) -> Tensor:
        wavelengths = 2 * math.pi / plain
        longest = self.original_len / self.low_freq_factor
        shortest = self.original_len / self.high_freq_factor
        stretched = torch.where(wavelengths > longest, plain / self.factor, plain)
        share = (self.original_len / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        mixed = (1 - share) * stretched / self.factor + share * stretched
        return torch.where((wavelengths >= shortest) & (wavelengths <= longest), mixed, stretched)

    def _yarn(self, plain: Tensor, stretched: Tensor) -> Tensor:
        low, high = self._dimension(self.beta_fast), self._dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            # a ramp of length zero would divide by zero
            high += 0.001
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        return stretched * (1 - keep) + plain * keep

    def _dimension(self, turns: float) -> float:
        """Returns the dimension, a fraction, that makes this many turns within original_len."""
        return (self.dim * math.log(self.original_len / (turns * 2 * math.pi))) / (2 * math.log(self.theta))
