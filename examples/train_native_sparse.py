"""Trains a small language model of English with Native Sparse Attention: compressed keys, chosen blocks and a window, gated.

Run: python examples/train_native_sparse.py [steps]
"""

import sys
from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy

from rooftile.models import TrainableDecoder

LENGTH = 64
MIXER = {"name": "native_sparse", "block_size": 16, "length": 8, "stride": 4, "count": 3, "window": 16}
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
torch.manual_seed(0)
text = torch.tensor(list("\n".join(topics.values()).encode()))
model = TrainableDecoder(256, hidden=64, heads=4, layers=2, mixers=MIXER)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

losses = []
for step in range(steps):
    starts = torch.randint(len(text) - LENGTH, (4, 1))
    batch = text[starts + torch.arange(LENGTH + 1)]  # (4, LENGTH + 1)
    loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step:3}  loss {losses[-1]:.3f}")
if losses[-1] > 0.8 * losses[0]:
    sys.exit("the loss did not fall")
