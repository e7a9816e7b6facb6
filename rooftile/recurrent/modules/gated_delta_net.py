"""The gated delta net as a module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftile.recurrent.arguments import BACKENDS, check_groups
from rooftile.recurrent.convolution import causal_conv, conv_step
from rooftile.recurrent.delta import gated_delta, gated_delta_step
from rooftile.recurrent.modules.parts import (
    GatedNorm,
    RecurrentLayer,
    RecurrentState,
    check_sizes,
    convolution,
    first_dt_bias,
    parted,
    undecayed,
)
from rooftile.recurrent.words import LAYER
from rooftile.runtime.arguments import check_backend
from rooftile.runtime.words import answers_with


class GatedDeltaNet(RecurrentLayer):
    """The mixer of gated delta nets: (B, T, dim) in, (B, T, dim) out.

    The parameters have the names and shapes of Transformers' `qwen3_5`, so `load_state_dict` takes its mixers.

    Args:
        dim: the width of the model.
        key_heads, value_heads: heads; the first divides the second.
        key_dim, value_dim: the widths of their heads.
        conv: the taps of the causal convolution of queries, keys and values.
        eps: of the norm.
        backend: as in `rooftile.recurrent.gated_delta`.
        device, dtype: of the projections, the convolution and the norm; A_log and dt_bias are float32 (float64 for
            float64).

    Raises:
        InvalidInput: sizes do not go together.

    Example:
        >>> layer = GatedDeltaNet(128, key_heads=2, value_heads=4, key_dim=32, value_dim=32)
        >>> layer(torch.randn(2, 30, 128)).shape
        torch.Size([2, 30, 128])

    Yang et al., Gated Delta Networks, arXiv:2412.06464.
    """

    @answers_with(LAYER)
    def __init__(
        self, dim: int, *, key_heads: int = 16, value_heads: int = 32, key_dim: int = 128, value_dim: int = 128, conv: int = 4,
        eps: float = 1e-6, backend: str | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        dim, key_heads, value_heads, key_dim, value_dim, conv = check_sizes(
            dim=dim, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, conv=conv
        )
        check_groups(value_heads, key_heads, "value_heads", "key_heads")
        self.dim, self.key_heads, self.value_heads = dim, key_heads, value_heads
        self.backend = check_backend(backend, BACKENDS)
        self._parts = key_heads * key_dim, key_heads * key_dim, value_heads * value_dim
        made = {"bias": False, "device": device, "dtype": dtype}
        self.in_proj_qkv = nn.Linear(dim, sum(self._parts), **made)  # type: ignore[arg-type]
        self.in_proj_z = nn.Linear(dim, self._parts[2], **made)  # type: ignore[arg-type]
        self.in_proj_b = nn.Linear(dim, value_heads, **made)  # type: ignore[arg-type]
        self.in_proj_a = nn.Linear(dim, value_heads, **made)  # type: ignore[arg-type]
        self.conv1d = convolution(sum(self._parts), conv, False, device, dtype)
        # the first biases are Mamba-2's: with ones, as in Transformers' class, a state forgets everything within a token
        self.dt_bias = undecayed(first_dt_bias(value_heads), device, dtype)
        self.A_log = undecayed(torch.log(torch.empty(value_heads).uniform_(0.01, 16)), device, dtype)
        self.norm = GatedNorm(value_dim, gate_first=False, eps=eps, device=device, dtype=dtype)
        self.out_proj = nn.Linear(self._parts[2], dim, **made)  # type: ignore[arg-type]

    def _mixed(
        self, x: Tensor, tail: Tensor | None, first: Tensor | None, cu: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        given: dict[str, Any] = {"cu": cu, "backend": self.backend}
        qkv, tail = parted(causal_conv(self.in_proj_qkv(x), self.conv1d.weight[:, 0], tail=tail, return_tail=keeps, **given))
        y, last = parted(gated_delta(*self._inputs(x, qkv), state=first, return_state=keeps, **given))
        return self._out(x, y), tail, last

    @torch.no_grad()
    def step(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Reads one token of each sequence, x (B, dim), and changes the state in place. Returns y (B, dim) without a gradient."""
        qkv = conv_step(state.tail, self.in_proj_qkv(x), self.conv1d.weight[:, 0])
        return self._out(x, gated_delta_step(state.state, *self._inputs(x, qkv)))

    def _inputs(self, x: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split(self._parts, -1)
        q, k = (part.unflatten(-1, (self.key_heads, -1)) for part in (q, k))
        wide = torch.promote_types(qkv.dtype, torch.float32)
        g = -torch.exp(self.A_log.to(wide)) * F.softplus(self.in_proj_a(x).to(wide) + self.dt_bias.to(wide))
        return q, k, v.unflatten(-1, (self.value_heads, -1)), g, self.in_proj_b(x).sigmoid().to(qkv.dtype)

    def _out(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.in_proj_z(x).unflatten(-1, (self.value_heads, -1))
        found: Tensor = self.out_proj(self.norm(y, z).flatten(-2))
        return found

    def extra_repr(self) -> str:
        return f"{self.dim}, key_heads={self.key_heads}, value_heads={self.value_heads}"
