"""A Hessian-vector product through attention, two ways, by the backend that has second derivatives.

Run: python examples/second_derivatives.py
"""

import torch
from torch.func import grad, jvp

import rooftile as rt

torch.manual_seed(0)
q, k, v, direction = (torch.randn(1, 24, 2, 16, dtype=torch.float64) for _ in range(4))


def loss(q: torch.Tensor) -> torch.Tensor:
    return rt.attention(q, k, v, rt.CAUSAL, backend="eager").square().sum()


x = q.clone().requires_grad_()
(g,) = torch.autograd.grad(loss(x), x, create_graph=True)
(twice_backward,) = torch.autograd.grad(g, x, direction)

_, forward_over_backward = jvp(grad(loss), (q,), (direction,))
torch.testing.assert_close(forward_over_backward, twice_backward)
print(f"Hessian-vector product of norm {twice_backward.norm():.6f}, the same both ways")
