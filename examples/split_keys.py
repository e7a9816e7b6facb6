"""Computes attention over parts of the keys and merges the parts: same output, same gradients.

Run: python examples/split_keys.py
"""

import torch

import rooftile as rt

torch.manual_seed(0)
q, k, v = (torch.randn(1, 512, 4, 64, requires_grad=True) for _ in range(3))


def whole() -> torch.Tensor:
    return rt.attention(q, k, v)


def in_parts(count: int) -> torch.Tensor:
    """Computes attention like `count` devices, each with a part of the keys and values."""
    shares = zip(k.chunk(count, dim=1), v.chunk(count, dim=1), strict=True)
    o, _ = rt.merge([rt.attention_with_lse(q, *share) for share in shares])
    return o


gradients = []
for o in (whole(), in_parts(4)):
    gradients.append(torch.autograd.grad(o.square().sum(), (q, k, v)))
    print(f"norm of the output {o.norm():.4f}, of the gradients", *(f"{g.norm():.4f}" for g in gradients[-1]))
for once, split in zip(*gradients, strict=True):
    torch.testing.assert_close(split, once, atol=1e-4, rtol=1e-4)
