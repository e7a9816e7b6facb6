"""The attention of Sparse Transformers as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.exact.projections import Projections
from rooftile.runtime.arguments import check_choice, check_count
from rooftile.runtime.words import answers_foreign_words


class SparseTransformer(Projections):
    """The attention of Sparse Transformers with its projections, causal: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim, heads, kv_heads, head_dim, bias, device, dtype: as in `Attention`.
        sets: "union", "split", "first" or "second": the argument `heads` of `rooftile.approximate.sparse_transformer`. Layers
            that alternate have "first" and "second" in turn.
        pattern, stride, summary, window, backend: as there.

    Raises:
        InvalidInput: sizes do not match, or there is no such pattern or set.

    Example:
        >>> layer = SparseTransformer(512, heads=8, pattern="fixed", stride=64)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])

    Child et al., arXiv:1904.10509.
    """

    @answers_foreign_words
    def __init__(
        self, dim: int, heads: int, *, backend: str | None = None, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, head_dim: int | None = None, kv_heads: int | None = None, pattern: str = "strided",
        sets: str = "union", stride: int = 128, summary: int = 8, window: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, kv_heads, head_dim, bias, None, device, dtype)
        self.pattern = check_choice("pattern", pattern, ("strided", "fixed"))
        self.sets = check_choice("sets", sets, ("union", "split", "first", "second"))
        self.stride, self.summary = check_count("stride", stride), check_count("summary", summary)
        self.window, self.backend = None if window is None else check_count("window", window), backend
        # the function checks how these fit together
        self._attend(*(torch.zeros(0, 0, n, 1) for n in (self.heads, self.kv_heads, self.kv_heads)))

    @answers_foreign_words
    def forward(self, x: Tensor) -> Tensor:
        """Computes the attention of x (B, T, dim) to itself."""
        return self.out(self._attend(*self.project(x)).flatten(-2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return approximate.sparse_transformer(
            q, k, v, backend=self.backend, sets=self.sets, pattern=self.pattern, stride=self.stride, summary=self.summary,
            window=self.window,
        )  # fmt: skip

    def extra_repr(self) -> str:
        own = f"summary={self.summary}" if self.pattern == "fixed" else f"window={self.window or self.stride}"
        return f"{super().extra_repr()}, pattern={self.pattern!r}, stride={self.stride}, {own}, sets={self.sets!r}"
