"""The Performer as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.approximate.arguments import is_causal
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.projections import Projections
from rooftile.runtime.words import answers_foreign_words


class Performer(Projections):
    """Performer's attention with its projections: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype: as in `Attention`.
        mask: FULL or CAUSAL. None is FULL.
        m: number of features.
        kind, lengths, orthogonal, seed: as in `rooftile.approximate.Features.draw`.
        backend: as in `rooftile.approximate.performer`.

    The projection is a buffer: it is saved with the parameters, moves with them, and has no gradient. `layer.redraw(seed)`
    draws another.

    Raises:
        InvalidInput: sizes do not match, or there is no such mask or kind.

    Example:
        >>> layer = Performer(512, heads=8, mask=rooftile.CAUSAL, m=256, seed=0)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])

    Choromanski et al., arXiv:2009.14794.
    """

    projection: Tensor

    @answers_foreign_words
    def __init__(
        self, dim: int, heads: int, *, backend: str | None = None, bias: bool = True, context_dim: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, head_dim: int | None = None,
        kind: str = "positive", kv_heads: int | None = None, lengths: str = "gaussian", m: int = 256, mask: Mask | None = FULL,
        orthogonal: bool = True, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype)
        is_causal("Performer", mask)
        self.mask, self.backend = FULL if mask is None else mask, backend
        self.kind, self.orthogonal, self.lengths = kind, orthogonal, lengths
        drawn = approximate.Features.draw(
            self.head_dim, m, device=device, kind=kind, lengths=lengths, orthogonal=orthogonal, seed=seed
        )
        self.register_buffer("projection", drawn.projection)

    @property
    def features(self) -> approximate.Features:
        """The features with the projection as it is now."""
        return approximate.Features(self.projection, self.kind, orthogonal=self.orthogonal, lengths=self.lengths)

    def redraw(self, seed: int) -> None:
        """Draws the projection anew, in place."""
        self.features.redraw(seed)

    @answers_foreign_words
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes Performer's attention of x (B, T, dim) to itself, or to a context (B, S, context_dim) if one is given."""
        o = approximate.performer(*self.project(x, context), self.mask, features=self.features, backend=self.backend)
        return self.out(o.flatten(-2))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mask={self.mask}, m={self.features.m}, kind={self.kind!r}"
