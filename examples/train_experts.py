"""Trains a small language model of English with experts as feed-forwards, with and without the balance loss, and serves it.

Run: python examples/train_experts.py [steps]
"""

import sys
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import torch
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.models import TrainableDecoder

LENGTH, COUNT = 64, 16
# three of sixteen, and a shared one
EXPERTS = {"name": "experts", "experts": COUNT, "active": 3, "shared": 1, "hidden": 32}
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
text = torch.tensor(list("\n".join(topics.values()).encode()))


def train(alpha: float) -> tuple[TrainableDecoder, list[float]]:
    """Returns the model and its losses; the balance loss is multiplied by alpha."""
    torch.manual_seed(0)
    model = TrainableDecoder(256, hidden=64, heads=4, layers=2, feed_forwards=EXPERTS)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=5e-3), []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (8, 1))
        batch = text[starts + torch.arange(LENGTH + 1)]  # (8, LENGTH + 1)
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + model.balance_loss(alpha)).backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"alpha {alpha}  step {step:3}  loss {losses[-1]:.3f}")
    return model, losses


for alpha in (0.0, 0.05):
    model, losses = train(alpha)
    counts = model.routings[-1].experts.flatten().bincount(minlength=COUNT)
    print(f"alpha {alpha}  the busiest expert has {float(counts.max() / counts.float().mean()):.1f} times the mean load")
    if losses[-1] > 0.8 * losses[0]:
        sys.exit("the loss did not fall")

prompt = list(b"The statement ")
with TemporaryDirectory() as folder:
    model.save(folder)
    llm = rt.LLM(folder, device="cpu", num_blocks=50)
written = llm.generate([prompt], rt.SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].token_ids
print(repr(bytes(prompt + written)))
with torch.no_grad():
    due = model(torch.tensor([prompt + written]))[0, len(prompt) - 1 : -1].argmax(-1)
if due.tolist() != written:
    sys.exit("served, the model writes another text than in training")
