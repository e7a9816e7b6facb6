"""Trains a low-rank adapter over a weight in 4 bits: only the adapter has gradients. Run: python examples/adapter_over_int4.py"""

import torch

import rooftile as rt

torch.manual_seed(0)
K, N, RANK = 128, 64, 4
base, change = torch.randn(N, K) / K**0.5, torch.randn(N, RANK) @ torch.randn(RANK, K) / K
weight = rt.quantise_weight(base, "int4", group=32)
print(f"{weight}: {weight.nbytes / weight.codes.shape[0] / K:.2f} bytes per weight")

down = (torch.randn(RANK, K) / K**0.5).requires_grad_()
up = torch.zeros(N, RANK, requires_grad=True)
optimiser = torch.optim.AdamW([down, up], lr=0.02)
for step in range(201):
    x = torch.randn(256, K)
    y = rt.linear(x, weight) + x @ down.T @ up.T
    loss = (y - x @ (base + change).T).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
