"""mamba-ssm's layers, by its arguments in its order, with its first values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.integrations.mamba_ssm.functions import offsets_of
from rooftile.recurrent.modules.mamba import Mamba as _Mamba
from rooftile.recurrent.modules.mamba2 import Mamba2 as _Mamba2
from rooftile.recurrent.modules.parts import first_dt_bias
from rooftile.runtime.arguments import check_choice, check_number
from rooftile.runtime.words import answers_foreign_words


class Mamba(_Mamba):
    """mamba-ssm's `Mamba` by its arguments, in its order: see `rooftile.nn.Mamba`. What names a kernel changes nothing.

    Example:
        >>> Mamba(64, d_state=16, d_conv=4, expand=2)(torch.randn(2, 30, 64)).shape
        torch.Size([2, 30, 64])
    """

    @answers_foreign_words
    def __init__(
        self, d_model: int, d_state: int = 16, d_conv: int = 4, expand: int = 2, dt_rank: int | str = "auto",
        dt_min: float = 0.001, dt_max: float = 0.1, dt_init: str = "random", dt_scale: float = 1.0, dt_init_floor: float = 1e-4,
        conv_bias: bool = True, bias: bool = False, use_fast_path: bool = True, layer_idx: int | None = None, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_choice("dt_init", dt_init, ("random", "constant"))
        super().__init__(
            d_model, state_size=d_state, conv=d_conv, expand=expand, rank=None if dt_rank == "auto" else int(dt_rank),
            conv_bias=conv_bias, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
        self.layer_idx = layer_idx
        most = self.rank**-0.5 * check_number("dt_scale", dt_scale)
        with torch.no_grad():
            self.dt_proj.weight.uniform_(most if dt_init == "constant" else -most, most)
            self.dt_proj.bias.copy_(_steps(self.width, dt_min, dt_max, dt_init_floor))

    @answers_foreign_words
    def forward(self, hidden_states: Tensor, inference_params: Any = None) -> Tensor:  # type: ignore[override]
        """Mixes the tokens of hidden_states (B, L, D)."""
        _check_no_memory(inference_params)
        return super().forward(hidden_states)


class Mamba2(_Mamba2):
    """mamba-ssm's `Mamba2` by its arguments, in its order: see `rooftile.nn.Mamba2`. `chunk_size` changes no result.

    Example:
        >>> Mamba2(64, d_state=32, headdim=32)(torch.randn(2, 30, 64)).shape
        torch.Size([2, 30, 64])
    """

    @answers_foreign_words
    def __init__(
        self, d_model: int, d_state: int = 128, d_conv: int = 4, conv_init: float | None = None, expand: int = 2,
        headdim: int = 64, d_ssm: int | None = None, ngroups: int = 1, A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False, rmsnorm: bool = True, norm_before_gate: bool = False, dt_min: float = 0.001,
        dt_max: float = 0.1, dt_init_floor: float = 1e-4, dt_limit: tuple[float, float] = (0.0, math.inf), bias: bool = False,
        conv_bias: bool = True, chunk_size: int = 256, use_mem_eff_path: bool = True, layer_idx: int | None = None,
        process_group: Any = None, sequence_parallel: bool = True, device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if not rmsnorm or norm_before_gate:
            raise Unsupported(
                "rmsnorm=False or norm_before_gate=True; has the norm of y silu(z), which every checkpoint was trained with"
            )
        if D_has_hdim or d_ssm not in (None, expand * d_model) or process_group is not None:
            raise Unsupported(
                f"D_has_hdim={D_has_hdim}, d_ssm={d_ssm} and process_group={process_group}; has a D for each head, a recurrence "
                f"of all expand d_model = {expand * d_model} channels, and one process"
            )
        super().__init__(
            d_model, state_size=d_state, conv=d_conv, expand=expand, head_dim=headdim, groups=ngroups, dt_limit=dt_limit,
            bias=bias, conv_bias=conv_bias, device=device, dtype=dtype,
        )  # fmt: skip
        self.layer_idx = layer_idx
        least, most = (check_number("A_init_range", x) for x in A_init_range)
        if not 0 < least <= most:
            raise InvalidInput(f"A_init_range is {A_init_range}; must be two numbers above 0, the second no less than the first")
        with torch.no_grad():
            self.A_log.uniform_(least, most).log_()
            self.dt_bias.copy_(_steps(self.heads, dt_min, dt_max, dt_init_floor))
            if conv_init is not None:
                self.conv1d.weight.uniform_(-check_number("conv_init", conv_init), conv_init)

    @answers_foreign_words
    def forward(  # type: ignore[override]
        self, u: Tensor, seqlen: int | None = None, seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:  # fmt: skip
        """Mixes the tokens of u (B, L, D), or (B L, D) with seqlen = L; with seq_idx (1, L) or cu_seqlens of packed sequences."""
        _check_no_memory(inference_params)
        x = u if seqlen is None else u.unflatten(0, (-1, seqlen))
        if seq_idx is None and cu_seqlens is None:
            return super().forward(x).view(u.shape)
        if x.ndim != 3 or x.shape[0] != 1:
            raise Unsupported(f"packed sequences in u {tuple(u.shape)}; has a batch of 1: pack all into one row")
        cu = cu_seqlens if cu_seqlens is not None else offsets_of(seq_idx, x.shape[1])
        return super().forward(x[0], cu=cu).view(u.shape)


def _check_no_memory(inference_params: Any) -> None:
    if inference_params is not None:
        raise Unsupported("inference_params; write y, state = layer.with_state(x, state), and layer.step(x, state) for one token")


def _steps(count: int, low: float, high: float, least: float) -> Tensor:
    """The biases of a layer's first steps, from mamba-ssm's dt_min, dt_max and dt_init_floor."""
    low, high = check_number("dt_min", low), check_number("dt_max", high)
    if not 0 < low <= high:
        raise InvalidInput(f"dt_min is {low} and dt_max {high}; must be above 0, the second no less than the first")
    return first_dt_bias(count, low, high, check_number("dt_init_floor", least))
