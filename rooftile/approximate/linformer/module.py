"""Linformer as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.errors import InvalidInput
from rooftile.exact.projections import Projections
from rooftile.runtime.arguments import check_choice, check_count
from rooftile.runtime.words import answers_foreign_words


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
        self, dim: int, heads: int, *, length: int, backend: str | None = None, bias: bool = True, context_dim: int | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, head_dim: int | None = None,
        kind: str = "learned", kv_heads: int | None = None, projection: torch.nn.Parameter | None = None, r: int = 256,
        share: str = "heads",
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype)
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
