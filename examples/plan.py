"""Teaches a small language model a page by heart, and plans a format for each of its layers on this machine.

Run: python examples/plan.py
"""

from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.models import TrainableDecoder
from rooftile.planning import Plan

LENGTH = 32
torch.manual_seed(0)
torch.set_num_threads(1)  # products this small are faster on one
page = torch.tensor(list(topics["assert"].encode()))[:800]
pieces = page.unfold(0, LENGTH + 1, 8)


def loss(model):
    return cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


model = TrainableDecoder(256, hidden=64, heads=4, layers=2, ffn=192)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(60):
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()

# on a CPU formats save no time, so this plan may not keep a layer as it is: the fastest of the others within the loss
formats = ["fp8", "int8", "int4:32", "mxfp4"]
free = rt.plan(model, pieces[:, :-1], data=loss, formats=formats, skip=["head"])
print(free, end="\n\n")

allowed = free.total.loss / 2
careful = rt.plan(model, pieces[:, :-1], data=loss, formats=formats, skip=["head"], max_loss=allowed)
print(f"with half of that loss: {sorted(set(careful.weights.values()))}, {careful.total.loss:.4f} nats of {allowed:.4f}")

before = loss(model).item()
Plan.from_json(careful.to_json()).apply(model)
with torch.no_grad():
    print(f"applied: {loss(model).item() - before:.4f} nats more; the plan said {careful.total.measured_loss:.4f}")
