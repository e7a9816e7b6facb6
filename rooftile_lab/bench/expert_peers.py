"""Experts of other libraries, beside which `rooftile bench experts` times ours.

    grouped-mm       a pipeline of `torch._grouped_mm`: sort, gather, product, SwiGLU, product, scatter, sum
    hf-grouped-mm, hf-batched-mm    Transformers' `experts_implementation="grouped_mm"` and `"batched_mm"`
    liger            Liger-Kernel's Triton kernels
    sonic-moe        SonicMoE's CuTe kernels, which are the grouped products of quack-kernels

Each takes the routing, tokens, the experts' weights (E, 2 h, d), gate rows first, and (E, d, h), and the shared network's weights
where there is one, which goes through PyTorch's products: no peer has it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.moe import Routing

Experts = Callable[..., Tensor]


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def with_shared(experts: Experts) -> Experts:
    """Adds the shared network to a peer's routed experts."""

    def call(routing: Routing, u: Tensor, up: Tensor, down: Tensor, *shared: Tensor) -> Tensor:
        y = experts(routing, u, up, down)
        if not shared:
            return y
        shared_up, shared_down = shared
        return y + functional.linear(swiglu(functional.linear(u, shared_up)), shared_down)

    return call


def grouped_mm(routing: Routing, u: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Computes experts as one writes them with torch._grouped_mm."""
    K = routing.experts.shape[1]
    ids, order = routing.experts.flatten().sort(stable=True)
    every = torch.arange(len(up), device=u.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids, every, right=True, out_int32=True)
    z = torch._grouped_mm(swiglu(torch._grouped_mm(u[order // K], up.mT, offs=ends)), down.mT, offs=ends)
    z = torch.zeros_like(z).index_copy(0, order, z).unflatten(0, (-1, K))
    return (z * routing.gates[..., None]).sum(1).to(u.dtype)


def transformers(name: str) -> Experts:
    """One of Transformers' implementations, which read a module's weights and sizes."""

    def call(routing: Routing, u: Tensor, up: Tensor, down: Tensor) -> Tensor:
        run = getattr(import_module("transformers.integrations.moe"), f"{name}_experts_forward")
        module = SimpleNamespace(
            gate_up_proj=up, down_proj=down, num_experts=len(up), has_gate=True, has_bias=False, is_transposed=False,
            is_concatenated=True, _apply_gate=swiglu, act_fn=functional.silu,
        )  # fmt: skip
        y: Tensor = run(module, u, routing.experts.long(), routing.gates.to(u.dtype))
        return y

    return call


def liger(routing: Routing, u: Tensor, up: Tensor, down: Tensor) -> Tensor:
    run: Any = import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
    y: Tensor = run.apply(u, up, down, routing.experts, routing.gates.to(u.dtype))
    return y


def sonic_moe(routing: Routing, u: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SonicMoE behind its router: the metadata of the choices, and both products with their gradients.

    Its public call for choices of the caller's is for a number of experts that differs from token to token, and slower.
    """
    sonic: Any = import_module("sonicmoe.functional")
    swish = import_module("sonicmoe.enums").ActivationType("swiglu")
    (N, K), E = routing.experts.shape, len(up)

    def numbers(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=u.device)

    counts, bounds, tokens, order, places = (numbers(size) for size in (E, E + 1, N * K, N * K, N * K))
    sonic.TC_topk_router_metadata_triton(routing.experts, E, counts, bounds, tokens, order, places)
    alone = not torch.is_grad_enabled()
    a, p = sonic._UpProjection.apply(
        u, up.permute(1, 2, 0), None, bounds, N * K, K, tokens, order, places, None, False, swish, alone, True
    )
    y: Tensor = sonic._DownProjection.apply(
        a, p, down.permute(1, 2, 0), None, routing.gates, bounds, N, K, tokens, order, places, None, False, swish
    )
    return y


PEERS: dict[str, Experts] = {
    name: with_shared(experts)
    for name, experts in (
        ("grouped-mm", grouped_mm),
        ("hf-grouped-mm", transformers("grouped_mm")),
        ("hf-batched-mm", transformers("batched_mm")),
        ("liger", liger),
        ("sonic-moe", sonic_moe),
    )
}
