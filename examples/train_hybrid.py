"""Trains a hybrid on English, two layers of Mamba-2 around one of attention, saves it, and serves the folder.

Run: python examples/train_hybrid.py [steps]
"""

import sys
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory

import torch
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.models import TrainableDecoder

LENGTH = 64
MAMBA2 = {"name": "mamba2", "head_dim": 32, "state_size": 32}
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
torch.manual_seed(0)
text = torch.tensor(list("\n".join(topics.values()).encode()))
model = TrainableDecoder(
    256, hidden=64, heads=4, layers=3, mixers=[MAMBA2, "attention", MAMBA2], feed_forwards=[None, "dense", None]
)
undecayed = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
decayed = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": undecayed, "weight_decay": 0.0}], lr=5e-3)

losses = []
for step in range(steps):
    starts = torch.randint(len(text) - LENGTH, (8, 1))
    batch = text[starts + torch.arange(LENGTH + 1)]  # (8, LENGTH + 1)
    loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 0 or step == steps - 1:
        print(f"step {step:3}  loss {losses[-1]:.3f}")
if losses[-1] > 0.8 * losses[0]:
    sys.exit("the loss did not fall")

prompts = [list(b"The statement "), list(b"An object of this type is")]
with TemporaryDirectory() as folder:
    model.save(folder)
    llm = rt.LLM(folder, device="cpu", num_blocks=50, max_num_seqs=4)
print(llm.caches)
outputs = llm.generate(prompts, rt.SamplingParams(temperature=0, max_tokens=24))
for prompt, output in zip(prompts, outputs, strict=True):
    written = output.outputs[0].token_ids
    print(repr(bytes(prompt + written)))
    with torch.no_grad():
        due = model(torch.tensor([prompt + written]))[0, len(prompt) - 1 : -1].argmax(-1)
    if due.tolist() != written:
        sys.exit("served, the model writes another text than in training")
