"""HSTU attention pair by pair in Python, and the problems that its backends are compared on."""

from __future__ import annotations

import bisect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rooftile as rt
from rooftile import recommend

D64 = torch.float64
MASKS = {
    "causal": rt.CAUSAL, "full": rt.FULL, "window": rt.CAUSAL & rt.Window(7), "both sides": rt.Window(3, 5),
    "prefix": rt.Prefix(9), "chunk": rt.CAUSAL & rt.Chunk(16),
}  # fmt: skip
# users without rows, with one, with few, and with more than a tile
LENGTHS = (5, 0, 1, 40, 150)


class Case(NamedTuple):
    """A call's tensors and keywords."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu: Tensor
    words: dict[str, Any]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that have gradients."""
        bias = self.words.get("bias")
        return (self.q, self.k, self.v) + (() if bias is None else (bias.positions, bias.times))

    def to(self, dtype: torch.dtype | None = None, device: str = "cpu") -> Case:
        """Returns a copy with leaves of its own; tables stay in fp32, or fp64 with an fp64 problem."""
        q, k, v = (x.detach().to(device, dtype).requires_grad_() for x in (self.q, self.k, self.v))
        words = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.words.items()}
        if (bias := words.get("bias")) is not None:
            wide = D64 if dtype == D64 else torch.float32
            positions, times = (x.detach().to(device, wide).requires_grad_() for x in (bias.positions, bias.times))
            words["bias"] = recommend.RelativeBias(positions, times, bias.edges, bias.zero)
        return Case(q, k, v, self.cu.to(device), words)

    def run(self, backend: str | None = None) -> Tensor:
        return recommend.hstu_attention(self.q, self.k, self.v, self.cu, backend=backend, **self.words)


def case(
    mask: str = "causal", contextual: int = 0, targets: tuple[int, ...] | None = None, bias: bool = False, *,
    lengths: tuple[int, ...] = LENGTHS, H: int = 2, D: int = 24, Dv: int = 16, zero: int = 0, scale: float | None = None,
) -> Case:  # fmt: skip
    """A problem of random numbers in fp64."""
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    total = int(cu[-1])
    q, k, v = (torch.randn(total, H, dim, dtype=D64, requires_grad=True) for dim in (D, D, Dv))
    words: dict[str, Any] = {"alpha": 0.3, "mask": MASKS[mask], "contextual": contextual, "scale": scale}
    if targets is not None:
        words["targets"] = torch.tensor(targets)
    if bias:
        words["times"] = torch.cat([torch.randint(10**9, 10**9 + 1000, (n,)).sort().values for n in lengths])
        tables = torch.randn(1, 30, dtype=D64, requires_grad=True), torch.randn(H, 9, dtype=D64, requires_grad=True)
        words["bias"] = recommend.RelativeBias(*tables, recommend.time_edges(9), zero)
    return Case(q, k, v, cu, words)


def by_pairs(given: Case) -> Tensor:
    """HSTU attention as its docstring says it, a pair at a time."""
    (q, k, v), cu, words = (x.detach() for x in given[:3]), given.cu, given.words
    y = torch.zeros_like(v)
    targets = words.get("targets", torch.zeros(len(cu) - 1, dtype=torch.int64)).tolist()
    for b, (start, stop) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        n, end = stop - start, stop - start - targets[b]
        scale = 1 / n if n and words["scale"] is None else words["scale"]
        for i in range(n):
            for j in range(n):
                if not sees(i, j, n, end, words["contextual"], words["mask"]):
                    continue
                for h in range(q.shape[1]):
                    x = words["alpha"] * float(q[start + i, h] @ k[start + j, h]) + bias_of(words, start, i, j, end, h)
                    y[start + i, h] += scale * x / (1 + math.exp(-x)) * v[start + j, h]
    return y


def sees(i: int, j: int, n: int, end: int, contextual: int, mask: rt.Mask) -> bool:
    if i >= end and i == j:
        return True
    if j >= end:
        return False
    if i < contextual or j < contextual:
        return True
    place = min(i, end) - contextual
    return mask.first_key(place) <= j - contextual <= mask.last_key(place)


def bias_of(words: dict[str, Any], start: int, i: int, j: int, end: int, h: int) -> float:
    bias = words.get("bias")
    if bias is None:
        return 0.0
    distance = min(i, end) - min(j, end) + bias.zero
    seconds = int(words["times"][start + i] - words["times"][start + j])
    positions, times = (x.detach() for x in (bias.positions, bias.times))
    bucket = bisect.bisect_right(bias.edges.tolist(), seconds)
    return float(positions[0, min(max(distance, 0), positions.shape[1] - 1)] + times[h, bucket])


def own_pairs(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, targets: tuple[int, ...], alpha: float, scale: float | None) -> Tensor:
    """The part of y that targets' pairs with themselves are; 0 for other rows."""
    y = torch.zeros_like(v)
    for b, (start, stop) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        own = slice(stop - targets[b], stop)
        x = alpha * (q[own] * k[own]).sum(-1, keepdim=True)
        y[own] = torch.nn.functional.silu(x) * v[own] * (1 / max(stop - start, 1) if scale is None else scale)
    return y
