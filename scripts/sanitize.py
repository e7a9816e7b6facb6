"""Runs small calls of every Hopper kernel, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python scripts/sanitize.py

Run it once without the sanitizer first, to fill Triton's cache: then the sanitizer watches only kernels.
"""

from __future__ import annotations

import torch

import rooftile as rt
from rooftile.exact.masks import Mask


def dense(dim: int, mask: Mask, deterministic: bool = False, heads_kv: int = 4) -> None:
    heads = (4, heads_kv, heads_kv)
    q, k, v = (torch.randn(1, 200, H, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for H in heads)
    o = rt.attention(q, k, v, mask, backend="hopper", deterministic=deterministic)
    o.backward(torch.randn_like(o))


def packed(dim: int) -> None:
    cu = torch.tensor([0, 70, 200], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(200, 4, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    o = rt.attention_packed(q, k, v, cu, cu, rt.CAUSAL, backend="hopper")
    o.backward(torch.randn_like(o))


def short_queries(dim: int) -> None:
    """Runs enough short queries that the heads of a group share tiles."""
    q, k, v = (torch.randn(64, T, heads, dim, device="cuda", dtype=torch.bfloat16) for T, heads in ((5, 32), (200, 4), (200, 4)))
    rt.attention(q, k, v, rt.CAUSAL, backend="hopper")


def quantised(dim: int, precision: str) -> None:
    """Runs dense calls, and packed ones with a NaN, which triggers the NaN fallback."""
    q, k, v = (torch.randn(200, heads, dim, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    cu = torch.tensor([0, 70, 200], dtype=torch.int32, device="cuda")
    for mask in (rt.FULL, rt.CAUSAL & rt.Window(50)):
        rt.attention(q[None], k[None], v[None], mask, precision=precision, backend="hopper")
        k[30, 0, 0] = v[90, 1, 1] = torch.nan
        rt.attention_packed(q, k, v, cu, cu, mask, precision=precision, backend="hopper")


def main() -> None:
    for dim in (64, 128, 256):
        for precision in ("fp8", "int8"):
            quantised(dim, precision)
        for mask in (rt.FULL, rt.CAUSAL):
            dense(dim, mask)
            dense(dim, mask, deterministic=True)
        dense(dim, rt.CAUSAL, heads_kv=1)
        packed(dim)
        short_queries(dim)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
