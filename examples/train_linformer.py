"""Trains a small encoder with Linformer, which has no causal form, to say which of two tokens a text has more of.

Run: python examples/train_linformer.py [steps]
"""

import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import rooftile as rt

LENGTH, WIDTH = 64, 32
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 80
torch.manual_seed(0)
embedding, norm, head = nn.Embedding(8, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 1)
mixer = rt.nn.Linformer(WIDTH, heads=4, length=LENGTH, r=16)
model = nn.ModuleList([embedding, norm, head, mixer])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses = []
for step in range(steps):
    tokens = torch.randint(8, (32, LENGTH))
    more = ((tokens == 0).sum(1) > (tokens == 1).sum(1)).float()
    x = embedding(tokens)
    loss = binary_cross_entropy_with_logits(head((x + mixer(norm(x))).mean(1)).squeeze(-1), more)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0 or step == steps - 1:
        print(f"step {step:3}  loss {losses[-1]:.3f}")
if sum(losses[-10:]) > 8 * losses[0]:
    sys.exit("the loss did not fall")
