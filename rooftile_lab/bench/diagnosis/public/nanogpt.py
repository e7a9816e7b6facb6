"""Trains a small GPT on random tokens, as nanoGPT does: --compile, and gradients of several --micro-batches."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile_lab.bench.diagnosis.public.course import Course


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between, self.grow, self.shrink = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.shrink(F.gelu(self.grow(self.between(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(layers))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    course = Course(compile=False, micro_batches=1)
    vocabulary, batch, length, width, layers, heads = course.sized(
        (1000, 4, 128, 384, 2, 6), (50304, 12, 1024, 768, 12, 12), (16, 4, 8, 16, 2, 2)
    )
    data = np.random.default_rng(0).integers(vocabulary, size=1 << 18).astype(np.uint16)
    batch = max(1, batch // course.options.micro_batches)
    model = GPT(vocabulary, length, width, layers, heads).to(course.device)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    called = torch.compile(model) if course.options.compile else model

    def get_batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - length - 1, (batch,)).tolist()
        x = torch.stack([torch.from_numpy(data[n : n + length].astype(np.int64)) for n in starts])
        y = torch.stack([torch.from_numpy(data[n + 1 : n + 1 + length].astype(np.int64)) for n in starts])
        return x.to(course.device), y.to(course.device)

    while course.goes_on():
        for _ in range(course.options.micro_batches):
            ids, targets = get_batch()
            with torch.autocast("cuda", torch.bfloat16, enabled=course.device.type == "cuda"):
                loss = called(ids, targets) / course.options.micro_batches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
