"""The signed Hadamard transform: spreads an outlier over a whole row, and keeps the product of two rows.

    M = diag(signs) H / sqrt(n)        M M^T = 1, so (q M)(k M)^T = q k^T

H is Sylvester's matrix of ones and minus ones. A row is multiplied by it in log2 n steps of sums and differences. Without
random signs, a row of equal numbers would become a single spike.

Tseng et al., QuIP#, arXiv:2402.04396; Shah et al., FlashAttention-3, arXiv:2407.08608, section 3.3.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.words import answers_foreign_words

# the longest row that one transform covers
LONGEST = 512
SHORTEST = 16


@answers_foreign_words
def hadamard(x: Tensor, signs: Tensor | None = None) -> Tensor:
    """Multiplies rows by the signed Hadamard matrix, in fp32.

    Args:
        x: (..., D), float. D is a multiple of 16. A power of two up to 512 is one transform; other sizes are several side by side
            (96 is 64 and 32).
        signs: (D,), 1 or -1 each; `signs_of(D)` if None.

    Raises:
        InvalidInput: D has no transform, or signs is not (D,).

    Example:
        >>> q, k = torch.randn(2, 10, 64).unbind()
        >>> error = hadamard(q) @ hadamard(k).mT - q @ k.mT        # rounding
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim == 0:
        raise InvalidInput(f"x is {x.dtype if isinstance(x, Tensor) else type(x).__name__}; must be a float tensor (..., D)")
    D = x.shape[-1]
    signs = signs_of(D, device=x.device) if signs is None else signs
    if signs.shape != (D,):
        raise InvalidInput(f"signs is {tuple(signs.shape)}; must be (D,) = ({D},)")
    x = x.float() * (signs * norms(D, x.device))
    return torch.cat([_transformed(piece) for piece in x.split(transform_lengths(D), dim=-1)], dim=-1)


@answers_foreign_words
def inverse_hadamard(x: Tensor, signs: Tensor | None = None) -> Tensor:
    """Inverts `hadamard`: H is its own inverse, and the signs are applied last."""
    D = x.shape[-1]
    signs = signs_of(D, device=x.device) if signs is None else signs
    return hadamard(x, torch.ones_like(signs)) * signs


def transform_lengths(D: int) -> list[int]:
    """Returns the lengths of the transforms that cover a row of D numbers, the longest first."""
    if D < SHORTEST or D % SHORTEST:
        raise InvalidInput(f"head dim {D} has no Hadamard transform; must be a multiple of {SHORTEST}, or take incoherent=False")
    found = []
    while D:
        found.append(min(1 << (D.bit_length() - 1), LONGEST))
        D -= found[-1]
    return found


# not created as inference tensors, even in inference mode: a later call may need gradients through them
@cache
@torch.inference_mode(False)
@answers_foreign_words
def signs_of(D: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Returns D signs, fp32, the same for a seed on every machine. Cached, because a copy to a GPU makes the host wait."""
    if torch.device(device).type != "cpu":
        return signs_of(D, seed).to(device)
    return torch.tensor([1.0 if _mixed(seed * 2**32 + n) >> 63 else -1.0 for n in range(D)])


def _mixed(n: int) -> int:
    """Hashes n to 64 bits (SplitMix64), independent of the PyTorch release."""
    z = (n + 1) * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@cache
@torch.inference_mode(False)
def norms(D: int, device: torch.device | str = "cpu") -> Tensor:
    """Returns 1 / sqrt(n) for each number of a row, n the length of its transform."""
    if torch.device(device).type != "cpu":
        return norms(D).to(device)
    return torch.cat([torch.full((n,), n**-0.5) for n in transform_lengths(D)])


def _transformed(x: Tensor) -> Tensor:
    """Computes sums and differences of neighbours at distance 1, 2, 4, ..., in the same order on every device."""
    n = x.shape[-1]
    step = 1
    while step < n:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x
