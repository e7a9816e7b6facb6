"""Native Sparse Attention as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.approximate.native_sparse.compression import check_lengths
from rooftile.approximate.native_sparse.selection import check_counts
from rooftile.errors import InvalidInput
from rooftile.exact.projections import Projections
from rooftile.runtime.arguments import check_choice, check_count
from rooftile.runtime.words import answers_foreign_words


class NativeSparse(Projections):
    """Native Sparse Attention with its projections, causal: (B, T, dim) in, (B, T, dim) out.

    Each of the three branches has keys and values of its own, and each head a sigmoid gate per branch.

    Args:
        dim, heads, kv_heads, head_dim, bias, device, dtype: as in `Attention`.
        compression: "mlp", which the paper has, "linear" or "mean": the map of a block of keys, or of values, to one. The first
            two add a learned vector for each place in the block before it. Key heads share the maps.
        hidden: width of the MLP; 4 head_dim if None.
        block_size, count, first, length, local, stride, window, backend: as in `rooftile.approximate.native_sparse`.

    Raises:
        InvalidInput: sizes do not match, or there is no such compression.

    Example:
        >>> layer = NativeSparse(512, heads=8, kv_heads=2, block_size=16, length=8, stride=4, count=4, window=32)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])

    Yuan et al., arXiv:2502.11089.
    """

    @answers_foreign_words
    def __init__(
        self, dim: int, heads: int, *, backend: str | None = None, bias: bool = True, block_size: int = 64,
        compression: str = "mlp", count: int = 16, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        first: int = 1, head_dim: int | None = None, hidden: int | None = None, kv_heads: int | None = None, length: int = 32,
        local: int = 2, stride: int = 16, window: int = 512,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, kv_heads, head_dim, bias, None, device, dtype)
        self.length, self.stride, self.block_size = check_lengths(length, stride, block_size)
        self.count, self.first, self.local = check_counts(count, first, local)
        self.window, self.backend = check_count("window", window), backend
        self.compression = check_choice("compression", compression, ("mlp", "linear", "mean"))
        D, made = self.head_dim, dict[str, Any](device=device, dtype=dtype)
        # keys and values of the compressed, the selected and the near branch
        self.k = torch.nn.Linear(dim, 3 * self.kv_heads * D, bias, **made)
        self.v = torch.nn.Linear(dim, 3 * self.kv_heads * D, bias, **made)
        self.gates = torch.nn.Linear(dim, 3 * heads, **made)
        self.phi = torch.nn.ModuleDict()
        self.places: torch.nn.Parameter | None = None
        if compression != "mean":
            self.places = torch.nn.Parameter(0.02 * torch.randn(2, self.length, D, **made))
            for name in ("k", "v"):
                wide = 4 * D if hidden is None else check_count("hidden", hidden)
                layers = (
                    [torch.nn.Linear(self.length * D, wide, **made), torch.nn.GELU(), torch.nn.Linear(wide, D, **made)]
                    if compression == "mlp"
                    else [torch.nn.Linear(self.length * D, D, **made)]
                )
                self.phi[name] = torch.nn.Sequential(torch.nn.Flatten(3), *layers)

    @answers_foreign_words
    def forward(self, x: Tensor, *, cu: Tensor | None = None) -> Tensor:
        """Computes the attention of x (B, T, dim) to itself; with cu, offsets (B + 1,), of packed sequences (total, dim)."""
        if cu is not None and self.positions is not None:
            raise InvalidInput("cu is given, and the model has rotary positions, which count from the first token of a batch row")
        q = self.place(self.q(x).unflatten(-1, (self.heads, self.head_dim)))
        gates = self.gates(x).unflatten(-1, (self.heads, 3)).sigmoid()
        shape = (3, self.kv_heads, self.head_dim)
        k, v = (project(x).unflatten(-1, shape).unbind(-3) for project in (self.k, self.v))
        # the compressed branch sees keys that are rotated already
        k = [self.place(one) for one in k]
        compressed = self._compressed(k[0], 0, cu), self._compressed(v[0], 1, cu)
        o = approximate.native_sparse(
            q, compressed, (k[1], v[1]), (k[2], v[2]), gates, backend=self.backend, block_size=self.block_size, count=self.count,
            cu=cu, first=self.first, length=self.length, local=self.local, stride=self.stride, window=self.window,
        )  # fmt: skip
        return self.out(o.flatten(-2))

    def _compressed(self, x: Tensor, which: int, cu: Tensor | None) -> Tensor:
        phi = self.phi["kv"[which]] if self.phi else "mean"
        places = None if self.places is None else self.places[which]
        return approximate.compress(x, cu=cu, length=self.length, phi=phi, places=places, stride=self.stride)

    def extra_repr(self) -> str:
        sizes = (
            f"length={self.length}, stride={self.stride}, block_size={self.block_size}, count={self.count}, window={self.window}"
        )
        return f"{super().extra_repr()}, {sizes}"
