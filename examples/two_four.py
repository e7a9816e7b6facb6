"""Teaches a small language model a page by heart with 2:4 weights, saves what is kept of them, and serves it.

Run: python examples/two_four.py
"""

import copy
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.models import TrainableDecoder

LENGTH, RECIPE = 32, rt.sparsity.Recipe()
torch.manual_seed(0)
torch.set_num_threads(1)  # products this small are faster on one
page = torch.tensor(list(topics["assert"].encode()))[:800]
pieces = page.unfold(0, LENGTH + 1, 8)


def loss(model, batch):
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model, steps, rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss(model, pieces[torch.randperm(len(pieces), generator=generator)[:16]]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def tested(model):
    return f"{loss(model, pieces).item():.3f} nats per byte"


model = TrainableDecoder(256, hidden=64, heads=4, layers=2, ffn=192)
train(model, 150, 5e-3)
continued = copy.deepcopy(model)
train(continued, 40, 2e-3)
print("in full precision:", tested(continued))
rt.qat.prepare(continued, None, skip=["head"], sparsity=RECIPE)
print("masked after training:", tested(continued))
rt.qat.prepare(model, None, skip=["head"], sparsity=RECIPE)
train(model, 40, 2e-3)
print("after the same steps with masks:", tested(model))
print(rt.qat.status(model))

with tempfile.TemporaryDirectory() as folder:
    sizes = {}
    for layout in ("dense", "two_four"):
        rt.qat.save(model, Path(folder, layout), layout=layout)
        sizes[layout] = Path(folder, layout, "model.safetensors").stat().st_size
    print(f"on disk: {sizes['dense']:,} bytes with zeros, {sizes['two_four']:,} bytes without")
    llm = rt.LLM(Path(folder, "two_four"), device="cpu", num_blocks=50)
    prompt = list(b"Assert")
    (output,) = llm.generate([prompt], rt.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    served = prompt + list(output.outputs[0].token_ids)
with torch.no_grad():
    best = model(torch.tensor([served]))[0].argmax(-1).tolist()
same = best[len(prompt) - 1 : -1] == served[len(prompt) :]
print(f"served: {bytes(served).decode(errors='replace')!r}; the trained model says {'the same' if same else 'something else'}")
