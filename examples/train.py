"""Trains a small language model on the bytes of this file, with a sliding window and grouped heads.

Run: python examples/train.py [steps]
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftile as rt

WIDTH, HEADS, KEY_HEADS, DIM, LENGTH = 64, 4, 2, 16, 96
MASK = rt.CAUSAL & rt.Window(48)


class Block(nn.Module):
    """Attention and a feed-forward net, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, WIDTH)
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, DIM))  # (B, T, H + 2 Hk, D)
        q, k, v = heads.split((HEADS, KEY_HEADS, KEY_HEADS), dim=2)
        x = x + self.out(rt.attention(q, k, v, MASK, sinks=self.sinks).flatten(2))
        return x + self.net(self.norms[1](x))


torch.manual_seed(0)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
text = torch.tensor(list(Path(__file__).read_bytes()))
model = nn.Sequential(nn.Embedding(256, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

losses = []
for step in range(steps):
    starts = torch.randint(len(text) - LENGTH, (8,))
    batch = torch.stack([text[s : s + LENGTH + 1] for s in starts])  # (8, LENGTH + 1)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0 or step == steps - 1:
        print(f"step {step:3}  loss {losses[-1]:.3f}")
if losses[-1] > 0.8 * losses[0]:
    sys.exit("the loss did not fall")
