"""Mamba-2 as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.recurrent.arguments import BACKENDS, check_limits
from rooftile.recurrent.convolution import causal_conv, conv_step
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
from rooftile.recurrent.state_space import ssd, ssd_step
from rooftile.recurrent.steps import UNLIMITED
from rooftile.recurrent.words import LAYER
from rooftile.runtime.arguments import check_backend, check_flag
from rooftile.runtime.words import answers_with


class Mamba2(RecurrentLayer):
    """The mixer of Mamba-2: (B, T, dim) in, (B, T, dim) out.

    The parameters have the names and shapes of mamba-ssm's and Transformers' mixers, so `load_state_dict` takes theirs.

    Args:
        dim: the width of the model.
        expand: the heads together are expand dim wide.
        head_dim: the width of a head.
        state_size: the numbers of state for each number of a head.
        groups: the groups of heads that share B and C.
        conv: the taps of the causal convolution.
        norm_groups: whether the norm is over each group by itself, as mamba-ssm has it; Transformers before 5.24 takes all
            together.
        dt_limit: steps are clamped to it.
        bias, conv_bias: whether the projections and the convolution have biases.
        eps: of the norm.
        backend: as in `rooftile.recurrent.ssd`.
        device, dtype: of the projections, the convolution and the norm; A_log, D and dt_bias are float32 (float64 for
            float64).

    Raises:
        InvalidInput: sizes do not go together.

    Example:
        >>> layer = Mamba2(256, head_dim=64)
        >>> layer(torch.randn(2, 100, 256)).shape
        torch.Size([2, 100, 256])

    Dao and Gu, Transformers are SSMs, arXiv:2405.21060.
    """

    @answers_with(LAYER)
    def __init__(
        self, dim: int, *, expand: int = 2, head_dim: int = 64, state_size: int = 128, groups: int = 1, conv: int = 4,
        norm_groups: bool = True, dt_limit: tuple[float, float] = UNLIMITED, bias: bool = False, conv_bias: bool = True,
        eps: float = 1e-5, backend: str | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        dim, expand, head_dim, state_size, groups, conv = check_sizes(
            dim=dim, expand=expand, head_dim=head_dim, state_size=state_size, groups=groups, conv=conv
        )
        width = expand * dim
        if width % head_dim or width // head_dim % groups:
            raise InvalidInput(
                f"expand dim is {width}, head_dim {head_dim} and groups {groups}; the second must divide the first, "
                f"and groups the heads"
            )
        heads = width // head_dim
        self.dim, self.heads, self.head_dim, self.groups, self.state_size = dim, heads, head_dim, groups, state_size
        self.dt_limit, self.backend = check_limits(dt_limit), check_backend(backend, BACKENDS)
        self._parts = width, width + 2 * groups * state_size, heads
        self.in_proj = nn.Linear(dim, sum(self._parts), bias=check_flag("bias", bias), device=device, dtype=dtype)
        self.conv1d = convolution(self._parts[1], conv, conv_bias, device, dtype)
        self.dt_bias = undecayed(first_dt_bias(heads), device, dtype)
        self.A_log = undecayed(torch.log(torch.empty(heads).uniform_(1, 16)), device, dtype)
        self.D = undecayed(torch.ones(heads), device, dtype)
        self.norm = GatedNorm(width, groups if norm_groups else 1, eps=eps, device=device, dtype=dtype)
        self.out_proj = nn.Linear(width, dim, bias=bias, device=device, dtype=dtype)

    def _mixed(
        self, x: Tensor, tail: Tensor | None, first: Tensor | None, cu: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        z, xBC, dt = self.in_proj(x).split(self._parts, -1)
        given: dict[str, Any] = {"cu": cu, "backend": self.backend}
        weight, bias = self.conv1d.weight[:, 0], self.conv1d.bias
        xBC, tail = parted(causal_conv(xBC, weight, bias, tail=tail, return_tail=keeps, **given))
        y, last = parted(
            ssd(
                *self._inputs(xBC, dt), D=self.D, dt_bias=self.dt_bias, dt_limit=self.dt_limit, state=first, return_state=keeps,
                **given,
            )
        )  # fmt: skip
        return self.out_proj(self.norm(y.flatten(-2), z)), tail, last

    @torch.no_grad()
    def step(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Reads one token of each sequence, x (B, dim), and changes the state in place. Returns y (B, dim) without a gradient."""
        z, xBC, dt = self.in_proj(x).split(self._parts, -1)
        xBC = conv_step(state.tail, xBC, self.conv1d.weight[:, 0], self.conv1d.bias)
        y = ssd_step(state.state, *self._inputs(xBC, dt), D=self.D, dt_bias=self.dt_bias, dt_limit=self.dt_limit)
        found: Tensor = self.out_proj(self.norm(y.flatten(-2), z))
        return found

    def _inputs(self, xBC: Tensor, dt: Tensor) -> tuple[Tensor, ...]:
        width, share = self.heads * self.head_dim, self.groups * self.state_size
        x, B, C = xBC.split((width, share, share), -1)
        B, C = (part.unflatten(-1, (self.groups, -1)) for part in (B, C))
        return x.unflatten(-1, (self.heads, -1)), dt, -torch.exp(self.A_log.to(_wide(x))), B, C

    def extra_repr(self) -> str:
        return f"{self.dim}, heads={self.heads}, head_dim={self.head_dim}, groups={self.groups}, state_size={self.state_size}"


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
