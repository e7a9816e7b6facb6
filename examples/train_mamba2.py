"""Trains a small language model of Mamba-2 layers on the bytes of this file, and continues a text token by token.

Run: python examples/train_mamba2.py [steps]
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftile as rt

WIDTH, LENGTH = 64, 96


class Block(nn.Module):
    """A mixer with a norm before it; Mamba-2 has no feed-forward net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(WIDTH), rt.nn.Mamba2(WIDTH, head_dim=32, state_size=32)

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

# the prompt once, then a token at a time: memory and time for a token do not grow with the text
embedding, *_, norm, head = model
with torch.no_grad():
    x, states = embedding(text[None, :40]), []
    for block in blocks:
        y, state = block.mixer.with_state(block.norm(x))
        x, states = x + y, [*states, state]
    token, written = head(norm(x[:, -1])).argmax(-1), []
    for _ in range(40):
        written.append(token)
        x = embedding(token)  # (1, WIDTH)
        for block, state in zip(blocks, states, strict=True):
            x = x + block.mixer.step(block.norm(x), state)
        token = head(norm(x)).argmax(-1)
    whole = torch.cat((text[None, :40], torch.stack(written, 1)), 1)
    again = model(whole)[:, 39:-1].argmax(-1)
print(f"{bytes(whole[0].tolist())!r}")
if not torch.equal(again, whole[:, 40:]):
    sys.exit("token by token the model writes another text than at once")
