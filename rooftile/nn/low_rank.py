"""Linear attention, Performer and Linformer as modules."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.approximate.arguments import check_choice, check_count, is_causal
from rooftile.errors import InvalidInput
from rooftile.masks import FULL, Mask
from rooftile.nn.projections import Projections
from rooftile.words import answers_foreign_words


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
        self,
        dim: int,
        heads: int,
        *,
        backend: str | None = None,
        bias: bool = True,
        context_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        feature: str = "elu",
        head_dim: int | None = None,
        kv_heads: int | None = None,
        mask: Mask | None = FULL,
        normalise: bool = True,
    ) -> None:
        super().__init__(
            dim, heads, bias=bias, context_dim=context_dim, device=device, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads
        )  # fmt: skip
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
        self,
        dim: int,
        heads: int,
        *,
        backend: str | None = None,
        bias: bool = True,
        context_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        head_dim: int | None = None,
        kind: str = "positive",
        kv_heads: int | None = None,
        lengths: str = "gaussian",
        m: int = 256,
        mask: Mask | None = FULL,
        orthogonal: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(
            dim, heads, bias=bias, context_dim=context_dim, device=device, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads
        )  # fmt: skip
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


class Linformer(Projections):
    """Linformer's attention with its projections: (B, T, dim) in, (B, T, dim) out, T at most `length`.

    Args:
        dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype: as in `Attention`.
        length: N, the longest text.
        r: rows that keys and values are projected to.
        share: "none": projections per key head, of keys and of values; "heads": one of keys and one of values; "keys-values":
            one for both. To share one over layers, give the same `projection` to all.
        projection: a parameter (1 | kv_heads, r, length) to use for keys and values in place of new ones.
        kind: "learned", or "mean": means of length / r tokens in a row, which is no parameter.
        backend: as in `rooftile.approximate.linformer`.

    There is no causal form. A convolution with a kernel and a stride of n is a projection whose rows have n numbers each: give
    it as `projection`.

    Raises:
        InvalidInput: sizes do not match.

    Example:
        >>> layer = Linformer(512, heads=8, length=1024, r=128)
        >>> layer(torch.randn(2, 1000, 512)).shape
        torch.Size([2, 1000, 512])

    Wang et al., arXiv:2006.04768.
    """

    @answers_foreign_words
    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        length: int,
        backend: str | None = None,
        bias: bool = True,
        context_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        head_dim: int | None = None,
        kind: str = "learned",
        kv_heads: int | None = None,
        projection: torch.nn.Parameter | None = None,
        r: int = 256,
        share: str = "heads",
    ) -> None:
        super().__init__(
            dim, heads, bias=bias, context_dim=context_dim, device=device, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads
        )  # fmt: skip
        length, r = check_count("length", length), check_count("r", r)
        share = check_choice("share", share, ("none", "heads", "keys-values"))
        self.kind, self.length, self.r, self.backend = check_choice("kind", kind, ("learned", "mean")), length, r, backend
        self.f: torch.nn.Parameter | None = None
        if projection is not None:
            due = [(n, r, length) for n in sorted({1, self.kv_heads})]
            if not isinstance(projection, torch.nn.Parameter) or tuple(projection.shape) not in due:
                came = tuple(projection.shape) if isinstance(projection, Tensor) else projection
                raise InvalidInput(f"projection is {came}; must be a parameter {' or '.join(map(str, due))}: (heads, r, length)")
            self.e = projection
        elif kind == "mean":
            if length % r:
                raise InvalidInput(f"length is {length} and r is {r}; r must divide length: a row is the mean of length / r")
            means = torch.eye(r, device=device, dtype=dtype).repeat_interleave(length // r, 1) * (r / length)
            self.register_buffer("e", means[None])
        else:
            shape = (self.kv_heads if share == "none" else 1, r, length)
            # rows of a random projection keep the length of what they project
            made = [torch.randn(shape, device=device, dtype=dtype) / r**0.5 for _ in range(1 if share == "keys-values" else 2)]
            self.e = torch.nn.Parameter(made[0])
            self.f = torch.nn.Parameter(made[1]) if len(made) > 1 else None

    @answers_foreign_words
    def forward(
        self,
        x: Tensor,  # (B, T, dim)
        context: Tensor | None = None,  # (B, S, context_dim)
        *,
        key_padding_mask: Tensor | None = None,  # (B, S)
    ) -> Tensor:
        """Computes Linformer's attention of x to itself, or to a context. key_padding_mask is True for padding."""
        o = approximate.linformer(
            *self.project(x, context), self.e, self.f, backend=self.backend, key_padding_mask=key_padding_mask
        )
        return self.out(o.flatten(-2))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, length={self.length}, r={self.r}, kind={self.kind!r}"
