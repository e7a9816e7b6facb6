"""Mamba-1 as a module."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rooftile.recurrent.arguments import BACKENDS
from rooftile.recurrent.convolution import causal_conv, conv_step
from rooftile.recurrent.modules.parts import (
    RecurrentLayer,
    RecurrentState,
    check_sizes,
    convolution,
    first_dt_bias,
    parted,
    undecayed,
)
from rooftile.recurrent.selective import selective_scan, selective_scan_step
from rooftile.recurrent.words import LAYER
from rooftile.runtime.arguments import check_backend, check_count, check_flag
from rooftile.runtime.words import answers_with


class Mamba(RecurrentLayer):
    """The mixer of Mamba-1: (B, T, dim) in, (B, T, dim) out.

    The parameters have the names and shapes of mamba-ssm's and Transformers' mixers, so `load_state_dict` takes theirs.

    Args:
        dim: the width of the model.
        expand: the channels are expand dim.
        state_size: the numbers of state for each channel.
        conv: the taps of the causal convolution.
        rank: of the projection that makes the steps; dim / 16, rounded up, if None.
        bias, conv_bias: whether in_proj and out_proj, and the convolution, have biases.
        backend: as in `rooftile.recurrent.selective_scan`.
        device, dtype: of the projections and the convolution; A_log and D are float32 (float64 for float64).

    Example:
        >>> layer = Mamba(64)
        >>> layer(torch.randn(2, 30, 64)).shape
        torch.Size([2, 30, 64])

    Gu and Dao, Mamba, arXiv:2312.00752.
    """

    @answers_with(LAYER)
    def __init__(
        self, dim: int, *, expand: int = 2, state_size: int = 16, conv: int = 4, rank: int | None = None, bias: bool = False,
        conv_bias: bool = True, backend: str | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        dim, expand, state_size, conv = check_sizes(dim=dim, expand=expand, state_size=state_size, conv=conv)
        rank = math.ceil(dim / 16) if rank is None else check_count("rank", rank)
        self.dim, self.width, self.state_size, self.rank = dim, expand * dim, state_size, rank
        self.backend = check_backend(backend, BACKENDS)
        made = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(dim, 2 * self.width, bias=check_flag("bias", bias), **made)  # type: ignore[arg-type]
        self.conv1d = convolution(self.width, conv, conv_bias, device, dtype)
        self.x_proj = nn.Linear(self.width, rank + 2 * state_size, bias=False, **made)  # type: ignore[arg-type]
        self.dt_proj = nn.Linear(rank, self.width, **made)  # type: ignore[arg-type]
        with torch.no_grad():
            self.dt_proj.weight.uniform_(-(rank**-0.5), rank**-0.5)
            self.dt_proj.bias.copy_(first_dt_bias(self.width))
        self.dt_proj.bias._no_weight_decay = True  # type: ignore[attr-defined]
        self.A_log = undecayed(torch.log(torch.arange(1.0, state_size + 1)).repeat(self.width, 1), device, dtype)
        self.D = undecayed(torch.ones(self.width), device, dtype)
        self.out_proj = nn.Linear(self.width, dim, bias=bias, **made)  # type: ignore[arg-type]

    def _mixed(
        self, x: Tensor, tail: Tensor | None, first: Tensor | None, cu: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        x, z = self.in_proj(x).chunk(2, -1)
        given: dict[str, Any] = {"cu": cu, "backend": self.backend}
        weight, bias = self.conv1d.weight[:, 0], self.conv1d.bias
        x, tail = parted(causal_conv(x, weight, bias, tail=tail, return_tail=keeps, **given))
        y, last = parted(
            selective_scan(*self._inputs(x), D=self.D, z=z, dt_bias=self.dt_proj.bias, state=first, return_state=keeps, **given)
        )
        return self.out_proj(y), tail, last

    @torch.no_grad()
    def step(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Reads one token of each sequence, x (B, dim), and changes the state in place. Returns y (B, dim) without a gradient."""
        x, z = self.in_proj(x).chunk(2, -1)
        x = conv_step(state.tail, x, self.conv1d.weight[:, 0], self.conv1d.bias)
        y = selective_scan_step(state.state, *self._inputs(x), D=self.D, z=z, dt_bias=self.dt_proj.bias)
        found: Tensor = self.out_proj(y)
        return found

    def _inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        low, B, C = self.x_proj(x).split((self.rank, self.state_size, self.state_size), -1)
        # the bias joins inside of the softplus, in fp32
        dt = nn.functional.linear(low, self.dt_proj.weight)
        return x, dt, -torch.exp(self.A_log.to(torch.promote_types(x.dtype, torch.float32))), B, C

    def extra_repr(self) -> str:
        return f"{self.dim}, width={self.width}, state_size={self.state_size}, rank={self.rank}"
