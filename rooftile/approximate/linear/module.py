"""Linear attention as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.approximate.arguments import is_causal
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.projections import Projections
from rooftile.runtime.arguments import check_choice
from rooftile.runtime.words import answers_foreign_words


class LinearAttention(Projections):
    """Linear attention with its projections: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype: as in `Attention`.
        mask: FULL or CAUSAL. None is FULL.
        feature, normalise, backend: as in `rooftile.approximate.linear`.

    Raises:
        InvalidInput: sizes do not match, or there is no such mask or feature.

    Example:
        >>> layer = LinearAttention(512, heads=8, mask=rooftile.CAUSAL)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])

    Katharopoulos et al., arXiv:2006.16236.
    """

    @answers_foreign_words
    def __init__(
        self, dim: int, heads: int, *, backend: str | None = None, bias: bool = True, context_dim: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, feature: str = "elu",
        head_dim: int | None = None, kv_heads: int | None = None, mask: Mask | None = FULL, normalise: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype)
        is_causal("linear attention", mask)
        if not callable(feature):
            check_choice("feature", feature, ("elu", "relu", "identity"))
        self.mask, self.feature, self.normalise, self.backend = FULL if mask is None else mask, feature, normalise, backend

    @answers_foreign_words
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes linear attention of x (B, T, dim) to itself, or to a context (B, S, context_dim) if one is given."""
        o = approximate.linear(
            *self.project(x, context), self.mask, backend=self.backend, feature=self.feature, normalise=self.normalise
        )
        return self.out(o.flatten(-2))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mask={self.mask}, feature={self.feature!r}" + ", normalise=False" * (not self.normalise)
