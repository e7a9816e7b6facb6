"""Attention as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact import api
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.projections import Projections
from rooftile.runtime.words import answers_foreign_words


class Attention(Projections):
    """Multi-head attention with its projections: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim: width of the input and the output.
        heads: query heads.
        kv_heads: key and value heads, a divisor of heads (GQA; 1 for MQA); heads if None.
        head_dim: width of a head; dim / heads if None.
        mask: FULL, CAUSAL, Window, Prefix, Chunk, Targets, or several combined with `&`. None is FULL.
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
        self, dim: int, heads: int, *, backend: str | None = None, bias: bool = True, context_dim: int | None = None,
        device: torch.device | str | None = None, dropout: float = 0.0, dtype: torch.dtype | None = None,
        head_dim: int | None = None, kv_heads: int | None = None, mask: Mask | None = FULL, sinks: bool = False,
        softcap: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype)
        mask = FULL if mask is None else mask
        if not isinstance(mask, Mask):
            raise InvalidInput(f"mask is {mask!r}; must be a rooftile mask, such as rooftile.CAUSAL")
        self.mask, self.dropout, self.softcap, self.backend = mask, dropout, softcap, backend
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

        key_padding_mask: True for tokens of the context that no query sees, as in `rooftile.attention`.
        """
        q, k, v = self.project(x, context)
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
        words = [super().extra_repr(), f"mask={self.mask}"]
        words += [f"dropout={self.dropout:g}"] * bool(self.dropout) + [f"softcap={self.softcap}"] * bool(self.softcap)
        words += ["sinks"] * (self.sinks is not None)
        return ", ".join(words)
