"""Sparse Transformers, Reformer and Routing Transformer as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.approximate.arguments import check_choice, check_count, check_flag
from rooftile.approximate.chosen.arguments import check_fraction, check_mask, check_seed
from rooftile.errors import InvalidInput
from rooftile.masks import FULL, Mask
from rooftile.nn.projections import Projections
from rooftile.words import answers_foreign_words


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
        self,
        dim: int,
        heads: int,
        *,
        backend: str | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        pattern: str = "strided",
        sets: str = "union",
        stride: int = 128,
        summary: int = 8,
        window: int | None = None,
    ) -> None:
        super().__init__(dim, heads, bias=bias, device=device, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads)
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
            q, k, v, backend=self.backend, heads=self.sets, pattern=self.pattern, stride=self.stride, summary=self.summary,
            window=self.window,
        )  # fmt: skip

    def extra_repr(self) -> str:
        own = f"summary={self.summary}" if self.pattern == "fixed" else f"window={self.window or self.stride}"
        return f"{super().extra_repr()}, pattern={self.pattern!r}, stride={self.stride}, {own}, sets={self.sets!r}"


class Reformer(Projections):
    """Reformer's attention with its projections, one for queries and keys: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim, heads, kv_heads, head_dim, bias, device, dtype: as in `Attention`; kv_heads are those of the values.
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
        self,
        dim: int,
        heads: int,
        *,
        backend: str | None = None,
        bias: bool = True,
        buckets: int | None = None,
        chunk: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        duplicates: str = "once",
        head_dim: int | None = None,
        kv_heads: int | None = None,
        mask: Mask | None = FULL,
        rounds: int = 4,
        scale: float | None = None,
        seed: int = 0,
        strict: bool = False,
    ) -> None:
        super().__init__(dim, heads, bias=bias, device=device, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads)
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


class Routing(Projections):
    """Routing attention with its projections and centroids: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype: as in `Attention`.
        clusters: centroids per head.
        mask: FULL or CAUSAL. None is FULL.
        decay: of the centroids, which follow their members in training; 1 keeps them as they are.
        commitment: weight of the loss that keeps tokens near their centroids.
        seed: of the first centroids.
        backend, strict, width: as in `rooftile.approximate.routing`.

    The centroids are a buffer in fp32: they are saved with the parameters and have no gradient. In training a call moves them,
    and leaves the commitment loss in `layer.loss`, to be added to that of the model.

    Raises:
        InvalidInput: sizes do not match, or there is no such mask or option.

    Example:
        >>> layer = Routing(512, heads=8, mask=rooftile.CAUSAL, clusters=4)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])

    Roy et al., arXiv:2003.05997.
    """

    centroids: Tensor

    @answers_foreign_words
    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        backend: str | None = None,
        bias: bool = True,
        clusters: int = 16,
        commitment: float = 1e-4,
        context_dim: int | None = None,
        decay: float = 0.999,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        mask: Mask | None = FULL,
        seed: int = 0,
        strict: bool = False,
        width: int | None = None,
    ) -> None:
        super().__init__(
            dim, heads, bias=bias, context_dim=context_dim, device=device, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads
        )  # fmt: skip
        check_mask("routing", mask)
        self.mask, self.strict = FULL if mask is None else mask, check_flag("strict", strict)
        if self.strict and width is not None:
            raise InvalidInput(f"width is {width} with strict; every token goes to one cluster: leave it out")
        self.width = None if width is None else check_count("width", width)
        self.decay, self.commitment, self.backend = check_fraction("decay", decay), commitment, backend
        generator = torch.Generator().manual_seed(check_seed(seed))
        drawn = torch.randn(heads, check_count("clusters", clusters), self.head_dim, generator=generator)
        self.register_buffer("centroids", drawn.to(device))
        self.loss: Tensor | None = None

    @answers_foreign_words
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes routing attention of x (B, T, dim) to itself, or to a context (B, S, context_dim) if one is given."""
        q, k, v = self.project(x, context)
        o, members = approximate.routing(
            q, k, v, self.centroids, self.mask, backend=self.backend, strict=self.strict, width=self.width
        )
        if self.training:
            # the loss is that of the centroids before they move
            self.loss = approximate.commitment_loss(q, k, self.centroids.clone(), weight=self.commitment)
            if self.decay < 1:
                self.centroids.copy_(approximate.update_centroids(self.centroids, q, k, members, decay=self.decay))
        return self.out(o.flatten(-2))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mask={self.mask}, clusters={self.centroids.shape[1]}" + ", strict" * self.strict
