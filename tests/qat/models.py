"""Small models to prepare."""

from __future__ import annotations

import torch
from torch import nn

# every format fits 128 columns
FORMATS = ("fp8", "fp8_tile", "int8", "w8", "int4", "int4:32", "int4:row", "mxfp8", "mxfp4", "nvfp4")


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    """128 to 192 to 128 to 40 numbers, with odd rows of weights."""
    torch.manual_seed(seed)
    layers = [nn.Linear(128, 256, bias=bias), nn.GELU(), nn.Linear(256, 128, bias=bias), nn.GELU(), nn.Linear(128, 37, bias=bias)]
    return nn.Sequential(*layers).to(dtype)


def inputs(rows: int = 5, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(2, rows, 128), with one channel and one row much larger than the rest."""
    x = torch.randn(2, rows, 128, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 40
    x[0, 1] *= 100
    return x.to(dtype)
