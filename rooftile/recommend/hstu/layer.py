"""The layer of generative recommenders: projection, pointwise attention, norm and gate.

Zhai et al., Actions Speak Louder than Words, arXiv:2402.17152.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL, Mask
from rooftile.recommend.hstu.arguments import check_edges
from rooftile.recommend.hstu.attention import BACKENDS, hstu_attention
from rooftile.recommend.hstu.bias import RelativeBias, time_edges
from rooftile.runtime.arguments import check_backend, check_count, check_number, python_number, shown
from rooftile.runtime.words import answers_foreign_words


class HSTU(nn.Module):
    """One layer: (total, dim) in, (total, dim) out, of packed users.

        u, v, q, k = split(silu(W norm(x) + b))
        x + W_o (norm(attention(q, k, v)) * u) + b_o

    The norms are LayerNorms, the first with weights and the second without, as in the reference implementation; the gate u stands
    behind the second norm. The attention's factor alpha is 1 / sqrt(attention_dim).

    Args:
        dim: the width of the rows.
        heads: how many.
        head_dim: of v and u; dim / heads if None.
        attention_dim: of q and k; head_dim if None.
        mask: among events, as in `hstu_attention`.
        positions: columns of a table of positions of the layer's own; 0 for none.
        buckets: columns of a table of times of the layer's own; 0 for none.
        edges: of the buckets, if there are some; `time_edges(buckets)` if None.
        scale: of the attention's sum, as in `hstu_attention`; None divides by the number of a user's rows.
        dropout: the probability that a number before the last projection is dropped in training.
        eps: of the norms.
        backend: as in `hstu_attention`.
        device, dtype: of the parameters.

    Raises:
        InvalidInput: sizes do not match.

    Example:
        >>> layer = HSTU(64, heads=2, positions=128)
        >>> layer(torch.randn(300, 64), torch.tensor([0, 100, 300]), targets=4).shape
        torch.Size([300, 64])

    Zhai et al., arXiv:2402.17152.
    """

    @answers_foreign_words
    def __init__(
        self, dim: int, heads: int, *, attention_dim: int | None = None, backend: str | None = None, buckets: int = 0,
        device: torch.device | str | None = None, dropout: float = 0.0, dtype: torch.dtype | None = None,
        edges: Tensor | None = None, eps: float = 1e-6, head_dim: int | None = None, mask: Mask | None = CAUSAL,
        positions: int = 0, scale: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.heads = check_count("dim", dim), check_count("heads", heads)
        if head_dim is None and self.dim % self.heads:
            raise InvalidInput(f"dim is {dim} and heads is {heads}; heads must divide dim, or give head_dim")
        self.head_dim = self.dim // self.heads if head_dim is None else check_count("head_dim", head_dim)
        self.attention_dim = self.head_dim if attention_dim is None else check_count("attention_dim", attention_dim)
        dropout = python_number(dropout)
        if not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
            raise InvalidInput(f"dropout is {shown(dropout)}; must be a number of at least 0 and below 1")
        if mask is not None and not isinstance(mask, Mask):
            raise InvalidInput(f"mask is {shown(mask)}; must be a mask such as rooftile.CAUSAL, or None")
        check_backend(backend, BACKENDS)
        self.mask, self.backend, self.scale = mask, backend, None if scale is None else check_number("scale", scale)
        self.dropout, self.eps = float(dropout), check_number("eps", eps)
        if self.eps < 0:
            raise InvalidInput(f"eps is {eps}; must be at least 0")
        if edges is not None and not check_count("buckets", buckets, 0):
            raise InvalidInput("edges came, and buckets is 0; give buckets, or leave edges out")
        made = {"device": device, "dtype": dtype}
        self.widths = (self.heads * self.head_dim,) * 2 + (self.heads * self.attention_dim,) * 2
        self.norm = nn.LayerNorm(self.dim, eps=eps, **made)  # type: ignore[arg-type]
        self.project = nn.Linear(self.dim, sum(self.widths), **made)  # type: ignore[arg-type]
        self.out = nn.Linear(self.heads * self.head_dim, self.dim, **made)  # type: ignore[arg-type]
        self.position_table = self.time_table = None
        if check_count("positions", positions, 0):
            self.position_table = nn.Parameter(torch.zeros(self.heads, positions, device=device))
        self.edges: Tensor | None
        self.register_buffer("edges", None)
        if check_count("buckets", buckets, 0):
            self.time_table = nn.Parameter(torch.zeros(self.heads, buckets, device=device))
            self.edges = check_edges(time_edges(buckets) if edges is None else edges, buckets, self.time_table.device)

    @answers_foreign_words
    def forward(
        self, x: Tensor, cu: Tensor, *, contextual: int = 0, positions: Tensor | None = None,
        targets: Tensor | int | None = None, times: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes the layer of x (total, dim) with users' offsets cu (B + 1,).

        Args:
            contextual, targets: as in `hstu_attention`.
            positions: as in `hstu_attention`, for a layer with a table of positions, and no other.
            times: seconds per row, for a layer with buckets, and no other.

        Raises:
            InvalidInput: an argument is wrong, or there is no table that reads it.
        """
        for name, given, table in (("positions", positions, self.position_table), ("times", times, self.time_table)):
            if given is not None and table is None:
                word = "buckets" if name == "times" else name
                raise InvalidInput(f"{name} came, and the layer has no {word}; give it {word}, or leave {name} out")
        _check_rows(x, self.dim)
        u, q, k, v = self.projected(x)
        y = hstu_attention(
            q, k, v, cu, alpha=self.alpha, mask=self.mask, bias=self.bias, contextual=contextual, targets=targets,
            positions=positions, times=times, scale=self.scale, backend=self.backend,
        )  # fmt: skip
        return self.gated(x, y, u)

    @property
    def alpha(self) -> float:
        """The factor of the scores."""
        return self.attention_dim**-0.5

    @property
    def bias(self) -> RelativeBias | None:
        """The layer's tables; None if the layer has no table."""
        if self.position_table is None and self.time_table is None:
            return None
        return RelativeBias(self.position_table, self.time_table, self.edges)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns u (total, H head_dim), and q, k and v (total, H, dim), of rows x (total, dim)."""
        u, v, q, k = F.silu(self.project(self.norm(x))).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))
        return u, q, k, v

    def gated(self, x: Tensor, y: Tensor, u: Tensor) -> Tensor:
        """Returns the layer's output (total, dim) from its rows x, the attention's output y (total, H, head_dim) and gate u."""
        gated = F.layer_norm(y.flatten(-2), (y.shape[-2] * y.shape[-1],), eps=self.eps) * u
        out: Tensor = x + self.out(F.dropout(gated, self.dropout, self.training))
        return out

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, head_dim={self.head_dim}, attention_dim={self.attention_dim}, mask={self.mask}"
        )


def _check_rows(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 2 or x.shape[1] != dim:
        raise InvalidInput(f"x is {shown(x)}; must be a float tensor (total, {dim}), the rows of all users")
