"""Reformer as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.approximate.chosen_arguments import check_mask, check_seed
from rooftile.errors import InvalidInput
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.projections import Projections
from rooftile.runtime.arguments import check_choice, check_count, check_flag
from rooftile.runtime.words import answers_foreign_words


class Reformer(Projections):
    """Reformer's attention with its projections, one for queries and keys: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim, heads, kv_heads, head_dim, bias, device, dtype: as in `Attention`; kv_heads count the heads of the values.
        mask: FULL or CAUSAL. None is FULL.
        seed: of the hashes, the same in every call; in training `layer.seed` may be set anew for each.
        backend, buckets, chunk, duplicates, rounds, scale, strict: as in `rooftile.approximate.reformer`.

    Raises:
        InvalidInput: sizes do not match, or there is no such mask or option.

    Example:
        >>> layer = Reformer(512, heads=8, mask=rooftile.CAUSAL, rounds=2)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])

    Kitaev et al., arXiv:2001.04451.
    """

    @answers_foreign_words
    def __init__(
        self, dim: int, heads: int, *, backend: str | None = None, bias: bool = True, buckets: int | None = None, chunk: int = 64,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, duplicates: str = "once",
        head_dim: int | None = None, kv_heads: int | None = None, mask: Mask | None = FULL, rounds: int = 4,
        scale: float | None = None, seed: int = 0, strict: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, kv_heads, head_dim, bias, None, device, dtype)
        # the queries are the keys
        del self.k
        self.mask, self.strict = FULL if mask is None else mask, check_flag("strict", strict)
        if self.strict and not check_mask("reformer", mask):
            raise InvalidInput("strict is True and mask is full; strict sees earlier tokens only: pass mask=rooftile.CAUSAL")
        check_mask("reformer", mask)
        self.chunk, self.rounds = check_count("chunk", chunk), check_count("rounds", rounds)
        self.buckets = None if buckets is None else check_count("buckets", buckets)
        if buckets is not None and buckets % 2:
            raise InvalidInput(f"buckets is {buckets}; must be even: half of them are the negatives of the others")
        self.duplicates = check_choice("duplicates", duplicates, ("once", "counted"))
        self.seed, self.scale, self.backend = check_seed(seed), scale, backend

    @answers_foreign_words
    def forward(self, x: Tensor) -> Tensor:
        """Computes Reformer's attention of x (B, T, dim) to itself."""
        qk = self.place(self.q(x).unflatten(-1, (self.heads, self.head_dim)))
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head_dim))
        o = approximate.reformer(
            qk, v, self.mask, backend=self.backend, buckets=self.buckets, chunk=self.chunk, duplicates=self.duplicates,
            rounds=self.rounds, scale=self.scale, seed=self.seed, strict=self.strict,
        )  # fmt: skip
        return self.out(o.flatten(-2))

    def extra_repr(self) -> str:
        words = f", mask={self.mask}, rounds={self.rounds}, chunk={self.chunk}"
        return super().extra_repr() + words + ", strict" * self.strict
