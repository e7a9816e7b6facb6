"""Teaches a small language model a page by heart with weights in 4 bits, saves it, and serves it.

Run: python examples/train_for_int4.py
"""

import copy
import tempfile
from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.models import TrainableDecoder

LENGTH, FORMAT = 32, "int4:row"
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
train(continued, 30, 1e-3)
print("in full precision:", tested(continued))
rt.qat.prepare(continued, FORMAT, skip=["head"])
print(f"rounded to {FORMAT} after training:", tested(continued))
rt.qat.prepare(model, FORMAT, skip=["head"])
train(model, 30, 1e-3)
print("after the same steps with rounded weights:", tested(model))

with tempfile.TemporaryDirectory() as folder:
    rt.qat.save(model, folder)
    llm = rt.LLM(folder, device="cpu", num_blocks=50)
    prompt = list(b"Assert")
    (output,) = llm.generate([prompt], rt.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    served = prompt + list(output.outputs[0].token_ids)
with torch.no_grad():
    best = model(torch.tensor([served]))[0].argmax(-1).tolist()
same = best[len(prompt) - 1 : -1] == served[len(prompt) :]
print(f"served: {bytes(served).decode(errors='replace')!r}; the trained model says {'the same' if same else 'something else'}")
