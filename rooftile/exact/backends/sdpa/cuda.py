"""PyTorch's FlashAttention-2 on a GPU, for full attention. It supports grouped heads, and any strides but the last."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rooftile.exact.backends.sdpa import stock
from rooftile.exact.spec import Grads, Spec


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    if not q.numel() or not k.numel():
        rows = (q.shape[0], q.shape[2], q.shape[1])
        return torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_full(rows, -math.inf, dtype=torch.float32)
    o, lse, *_ = stock.kernel(stock.CUDA_FORWARD, "CUDA")(*map(stock.by_heads, (q, k, v)), 0.0, False, False, scale=spec.scale)
    return o.transpose(1, 2).contiguous(), lse.contiguous()


def backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spec: Spec) -> Grads:
    if not q.numel() or not k.numel():
        return Grads(*(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)))
    # without dropout the generator's state is not read
    state = torch.empty(0, dtype=torch.uint64, device=q.device)
    grads = stock.kernel(stock.CUDA_BACKWARD, "CUDA")(
        *(stock.by_heads(x) for x in (do, q, k, v, o)), lse, None, None, q.shape[1], k.shape[1], 0.0, False, state, state,
        scale=spec.scale,
    )  # fmt: skip
    return Grads(*(x.transpose(1, 2).contiguous() for x in grads))
