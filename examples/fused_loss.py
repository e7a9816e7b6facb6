"""A loss from hidden states that never stores all logits, beside PyTorch's. Run: python examples/fused_loss.py"""

import torch
from torch.nn.functional import cross_entropy, linear

from rooftile import fused

torch.manual_seed(0)
T, D, V = 64, 32, 1000
hidden, head = torch.randn(T, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
target = torch.randint(V, (T,))
target[::7] = -100

ours = fused.linear_cross_entropy(hidden, head, target, label_smoothing=0.1)
theirs = cross_entropy(linear(hidden, head), target, label_smoothing=0.1)
print(f"loss {ours.item():.6f}, PyTorch's {theirs.item():.6f}")
for name, a, b in zip(("hidden", "head"), *(torch.autograd.grad(x, (hidden, head)) for x in (ours, theirs)), strict=True):
    print(f"gradient of {name}: largest difference {(a - b).abs().max().item():.1e}")
