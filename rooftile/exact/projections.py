"""The projections that every attention layer has: queries, keys and values by heads, and the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.rotary_positions import RotaryPositions


class Projections(torch.nn.Module):
    """Projects (B, T, dim) to queries, keys and values by heads, and heads back to (B, T, dim).

    A model with rotary positions sets `positions`, which then rotates queries and keys.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None, bias: bool = True,
        context_dim: int | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise InvalidInput(f"heads is {heads} and kv_heads is {kv_heads}; kv_heads must divide heads")
        if head_dim is None and dim % heads:
            raise InvalidInput(f"dim is {dim} and heads is {heads}; heads must divide dim, or give head_dim")
        head_dim = dim // heads if head_dim is None else head_dim
        if head_dim < 1:
            raise InvalidInput(f"head_dim is {head_dim}; must be at least 1")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        context_dim = dim if context_dim is None else context_dim
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q = torch.nn.Linear(dim, heads * head_dim, **made)
        self.k = torch.nn.Linear(context_dim, kv_heads * head_dim, **made)
        self.v = torch.nn.Linear(context_dim, kv_heads * head_dim, **made)
        self.out = torch.nn.Linear(heads * head_dim, dim, **made)
        self.positions: RotaryPositions | None = None

    def place(self, x: Tensor) -> Tensor:
        """Queries or keys (B, T, H, D), rotated by their place if the model has rotary positions."""
        return x if self.positions is None else self.positions(x)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The queries (B, T, H, D) of x, and the keys and values (B, S, Hk, D) of the context, which is x if None."""
        context = x if context is None else context
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.k(context).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v(context).unflatten(-1, (self.kv_heads, self.head_dim))
        return self.place(q), self.place(k), v

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
