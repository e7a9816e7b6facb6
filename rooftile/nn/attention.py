"""Attention as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile import api
from rooftile.errors import InvalidInput
from rooftile.masks import FULL, Mask
from rooftile.words import answers_foreign_words


class Attention(torch.nn.Module):
    """Multi-head attention with its projections: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim: width of the input and the output.
        heads: query heads.
        kv_heads: key and value heads, a divisor of heads (GQA; 1 for MQA); heads if None.
        head_dim: width of a head; dim / heads if None.
        mask: FULL, CAUSAL, Window, Prefix, Chunk, or several combined with `&`. None is FULL.
        bias: whether the projections add one.
        context_dim: width of the context for keys and values; dim if None.
        dropout: probability of dropping a weight, in training only.
        softcap: as in `rooftile.attention`; None for none.
        sinks: whether each head has a learned logit that joins the softmax with a value of zero.
        backend: as in `rooftile.attention`; None for the fastest.
        device, dtype: of the parameters.

    Raises:
        InvalidInput: sizes do not match.

    Example:
        >>> layer = Attention(512, heads=8, kv_heads=2, mask=rooftile.CAUSAL)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])
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
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        mask: Mask | None = FULL,
        sinks: bool = False,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise InvalidInput(f"heads is {heads} and kv_heads is {kv_heads}; kv_heads must divide heads")
        if head_dim is None and dim % heads:
            raise InvalidInput(f"dim is {dim} and heads is {heads}; heads must divide dim, or give head_dim")
        head_dim = dim // heads if head_dim is None else head_dim
        if head_dim < 1:
            raise InvalidInput(f"head_dim is {head_dim}; must be at least 1")
        mask = FULL if mask is None else mask
        if not isinstance(mask, Mask):
            raise InvalidInput(f"mask is {mask!r}; must be a rooftile mask, such as rooftile.CAUSAL")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.mask, self.dropout, self.softcap, self.backend = mask, dropout, softcap, backend
        context_dim = dim if context_dim is None else context_dim
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q = torch.nn.Linear(dim, heads * head_dim, **made)
        self.k = torch.nn.Linear(context_dim, kv_heads * head_dim, **made)
        self.v = torch.nn.Linear(context_dim, kv_heads * head_dim, **made)
        self.out = torch.nn.Linear(heads * head_dim, dim, **made)
        self.sinks = torch.nn.Parameter(torch.zeros(heads, device=device, dtype=dtype)) if sinks else None

    @answers_foreign_words
    def forward(
        self,
        x: Tensor,  # (B, T, dim)
        context: Tensor | None = None,  # (B, S, context_dim)
        *,
        key_padding_mask: Tensor | None = None,  # (B, S)
    ) -> Tensor:
        """Computes attention of x to itself, or to a context if one is given.

        key_padding_mask: True for tokens of the context that nobody sees, as in `rooftile.attention`.
        """
        context = x if context is None else context
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))  # (B, T, H, D)
        k = self.k(context).unflatten(-1, (self.kv_heads, self.head_dim))  # (B, S, Hk, D)
        v = self.v(context).unflatten(-1, (self.kv_heads, self.head_dim))  # (B, S, Hk, D)
        o = api.attention(
            q,
            k,
            v,
            self.mask,
            backend=self.backend,
            dropout=self.dropout if self.training else 0.0,
            key_padding_mask=key_padding_mask,
            sinks=self.sinks,
            softcap=self.softcap,
        )
        return self.out(o.flatten(-2))

    def extra_repr(self) -> str:
        words = [f"heads={self.heads}", f"kv_heads={self.kv_heads}", f"head_dim={self.head_dim}", f"mask={self.mask}"]
        words += [f"dropout={self.dropout:g}"] * bool(self.dropout) + [f"softcap={self.softcap}"] * bool(self.softcap)
        words += ["sinks"] * (self.sinks is not None)
        return ", ".join(words)
