"""The expert layers of Transformers with random weights in fp32, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import moe

D, H, E, K = 32, 24, 8, 3
SIZES = {
    "hidden_size": D, "intermediate_size": H, "moe_intermediate_size": H, "num_experts": E, "num_local_experts": E,
    "n_routed_experts": E, "num_experts_per_tok": K,
}  # fmt: skip


def made(family: str, layer: str, config: str, **options: Any) -> torch.nn.Module:
    """A layer of a family with random weights, whose experts run one by one."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    settings = getattr(module, config)(**SIZES | options)
    settings._experts_implementation = "eager"
    built = getattr(module, layer)(settings).eval()
    with torch.no_grad():
        for name, x in built.named_parameters():
            x.normal_(std=1.0 if "router" in name or name.startswith("gate") else x.shape[-1] ** -0.5)
        for x in built.buffers():
            x.uniform_(-0.5, 0.5)
    return built


def experts_of(layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
    return layer.experts.gate_up_proj, layer.experts.down_proj


def shared_of(network: torch.nn.Module) -> dict[str, Tensor]:
    up = torch.cat((network.gate_proj.weight, network.up_proj.weight))
    return {"shared_up": up, "shared_down": network.down_proj.weight}


def softmax(layer: torch.nn.Module, x: Tensor, **router: Any) -> Tensor:
    return moe.experts(x, moe.route(x, layer.gate.weight, active=K, **router), *experts_of(layer))


def qwen3_next(layer: torch.nn.Module, x: Tensor) -> Tensor:
    routing = moe.route(x, layer.gate.weight, active=K, normalise=True, round_gates=True)
    gate = layer.shared_expert_gate.weight[0]
    return moe.experts(x, routing, *experts_of(layer), **shared_of(layer.shared_expert), shared_gate=gate)


def gpt_oss(layer: torch.nn.Module, x: Tensor) -> Tensor:
    routing = moe.route(
        x, layer.router.weight, active=K, score="chosen softmax", logit_bias=layer.router.bias, round_gates=True
    )  # fmt: skip
    # gate and up alternate, and weights are transposed
    up, bias = layer.experts.gate_up_proj.mT, layer.experts.gate_up_proj_bias
    up, bias = torch.cat((up[:, ::2], up[:, 1::2]), 1), torch.cat((bias[:, ::2], bias[:, 1::2]), 1)
    down, down_bias = layer.experts.down_proj.mT, layer.experts.down_proj_bias
    return moe.experts(x, routing, up, down, activation="clamped", up_bias=bias, down_bias=down_bias)


def deepseek_v2(layer: torch.nn.Module, x: Tensor, **router: Any) -> Tensor:
    routing = moe.route(x, layer.gate.weight, active=K, scale=1.5, **router)
    return moe.experts(x, routing, *experts_of(layer), **shared_of(layer.shared_experts))


V3 = moe.Router(
    active=K, score="sigmoid", groups=4, active_groups=2, group_score="sum of best two", normalise=True, scale=2.5
)  # fmt: skip


def deepseek_v3(layer: torch.nn.Module, x: Tensor) -> Tensor:
    routing = moe.route(x, layer.gate.weight, V3, bias=layer.gate.e_score_correction_bias)
    return moe.experts(x, routing, *experts_of(layer), **shared_of(layer.shared_experts))


def granite(layer: torch.nn.Module, x: Tensor) -> Tensor:
    routing = moe.route(x, layer.router.weight, active=K, score="chosen softmax", round_gates=True)
    return moe.experts(x, routing, *experts_of(layer))


def nemotron(layer: torch.nn.Module, x: Tensor) -> Tensor:
    routing = moe.route(x, layer.gate.weight, V3, bias=layer.gate.e_score_correction_bias)
    shared = {"shared_up": layer.shared_experts.up_proj.weight, "shared_down": layer.shared_experts.down_proj.weight}
    return moe.experts(x, routing, layer.experts.up_proj, layer.experts.down_proj, activation="relu2", **shared)


QWEN = ("qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig")
GROUPS = {"n_group": 4, "topk_group": 2}
V3_SIZES = {**GROUPS, "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[tuple[str, str, str], dict[str, Any], Callable[..., Tensor], dict[str, Any]]] = {
    "mixtral": (("mixtral", "MixtralSparseMoeBlock", "MixtralConfig"), {}, softmax, {"normalise": True}),
    "qwen3_moe": (QWEN, {"norm_topk_prob": True}, softmax, {"normalise": True}),
    "qwen3_moe plain": (QWEN, {"norm_topk_prob": False}, softmax, {}),
    "olmoe": (("olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig"), {}, softmax, {}),
    "qwen3_next": (
        ("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig"),
        {"shared_expert_intermediate_size": 40, "norm_topk_prob": True}, qwen3_next, {},
    ),
    "gpt_oss": (("gpt_oss", "GptOssMLP", "GptOssConfig"), {}, gpt_oss, {}),
    "deepseek_v2": (
        ("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config"),
        {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        deepseek_v2, {},
    ),
    "deepseek_v2 groups": (
        ("deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config"),
        {"topk_method": "group_limited_greedy", **GROUPS, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        deepseek_v2, {"groups": 4, "active_groups": 2},
    ),
    "deepseek_v3": (("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config"), V3_SIZES, deepseek_v3, {}),
    "granite": (("granitemoehybrid", "GraniteMoeHybridMoE", "GraniteMoeHybridConfig"), {"mamba_n_heads": 2}, granite, {}),
    "nemotron": (
        ("nemotron_h", "NemotronHMoE", "NemotronHConfig"),
        {**V3_SIZES, "moe_shared_expert_intermediate_size": 40}, nemotron, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_transformers(family: str) -> None:
    names, sizes, ours, router = FAMILIES[family]
    layer = made(*names, **sizes)
    x = torch.randn(2, 19, D, requires_grad=True)
    due = layer(x)
    due = due[0] if isinstance(due, tuple) else due
    found = ours(layer, x, **router)
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)
    assert due.abs().max() > 0.1
    # the gradients of every parameter that is in use, the router's too
    leaves = [x, *(p for p in layer.parameters())]
    incoming = torch.randn_like(due)
    grads = zip(*(torch.autograd.grad(y, leaves, incoming, allow_unused=True) for y in (found, due)), strict=True)
    for (name, _), (a, b) in zip([("x", x), *layer.named_parameters()], grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
