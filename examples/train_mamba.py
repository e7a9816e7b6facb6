"""Trains a small language model of Mamba-1 layers on the bytes of this file.

Run: python examples/train_mamba.py [steps]
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftile as rt

WIDTH, LENGTH = 64, 96


class Block(nn.Module):
    """A mixer with a norm before it; Mamba has no feed-forward net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(WIDTH), rt.nn.Mamba(WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, WIDTH)
        return x + self.mixer(self.norm(x))


torch.manual_seed(0)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
text = torch.tensor(list(Path(__file__).read_bytes()))
blocks = nn.ModuleList(Block() for _ in range(2))
model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256))
undecayed = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
decayed = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}], lr=3e-3)

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
