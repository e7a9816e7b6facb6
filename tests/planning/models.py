"""Small models to plan for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile.models import TrainableDecoder


def mlp(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """128 to 256 to 128 to 64 numbers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 64)).to(dtype)


def inputs(rows: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """(rows, 128)."""
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(1)).to(dtype)


def llama(seed: int = 0) -> TrainableDecoder:
    """Two layers of 64 channels, over 97 tokens."""
    torch.manual_seed(seed)
    return TrainableDecoder(97, hidden=64, heads=4, layers=2, ffn=128, max_len=64)


def tokens(texts: int = 3, length: int = 33) -> Tensor:
    """(texts, length)."""
    return torch.randint(97, (texts, length), generator=torch.Generator().manual_seed(2))


class Block(nn.Module):
    """Attention and a gated feed-forward, with projections of one input, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.again = self.twice = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        h = self.norm(x)
        x = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return self.again(self.twice(x))


class Blocks(nn.Module):
    """Two blocks after an embedding whose weight the head shares, with dropout and a batch norm, whose buffers move."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))
