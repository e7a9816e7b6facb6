"""Trains a small language model of English whose feed-forward networks are experts, with and without the balance loss.

Run: python examples/train_experts.py [steps]
"""

import sys
from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile import moe

LENGTH, WIDTH, EXPERTS, ACTIVE = 64, 64, 16, 3
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
text = torch.tensor(list("\n".join(topics.values()).encode()))


class Block(torch.nn.Module):
    """Attention, then experts: three of sixteen, and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = rt.nn.Attention(WIDTH, heads=4, mask=rt.CAUSAL)
        self.experts = rt.nn.DeepSeekMoE(WIDTH, experts=EXPERTS, active=ACTIVE, shared=1, hidden=32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, moe.Routing]:
        x = x + self.attention(self.norms[0](x))
        u = self.norms[1](x)
        routing = self.experts.route(u)
        return x + self.experts(u, routing), routing


def train(alpha: float) -> tuple[list[float], float]:
    """Returns the losses, and how much of the load the busiest expert of the last layer has, 1 if all have the same."""
    torch.manual_seed(0)
    tokens, head = torch.nn.Embedding(256, WIDTH), torch.nn.Linear(WIDTH, 256)
    blocks = torch.nn.ModuleList(Block() for _ in range(2))
    parameters = [p for part in (tokens, head, blocks) for p in part.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters, lr=5e-3), []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (8, 1))
        batch = text[starts + torch.arange(LENGTH + 1)]  # (8, LENGTH + 1)
        x, balance = tokens(batch[:, :-1]), torch.zeros(())
        for block in blocks:
            x, routing = block(x)
            balance = balance + moe.balance_loss(routing, alpha=alpha)
        loss = cross_entropy(head(x).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + balance).backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"alpha {alpha}  step {step:3}  loss {losses[-1]:.3f}")
    counts = routing.experts.flatten().bincount(minlength=EXPERTS)
    return losses, float(counts.max() / counts.float().mean())


for alpha in (0.0, 0.05):
    losses, busiest = train(alpha)
    print(f"alpha {alpha}  the busiest expert has {busiest:.1f} times the mean load")
    if losses[-1] > 0.8 * losses[0]:
        sys.exit("the loss did not fall")
