"""Tiny models of Transformers whose layers have states, and what mixes their tokens, by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

import rooftile
from rooftile.fused.rope import rotate
from rooftile.models import Decoder
from rooftile.models.layers import Layer

VOCABULARY = 97
# a bucket of 16 tokens is Transformers' own: prompts here are longer and shorter
MAMBA2 = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 10, "expand": 2,
    "state_size": 12, "n_groups": 1, "chunk_size": 16, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
MAMBA = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 3, "expand": 2, "state_size": 6, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
BAMBA = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_chunk_size": 16,
}  # fmt: skip
DELTA = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 5,
}  # fmt: skip
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
NEMOTRON = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 16,
    "use_mamba_kernels": False, "hybrid_override_pattern": "M-M*-MM-*",
    # Transformers clamps steps to it in a prefill, and not in a step
    "time_step_min": 1e-30,
}  # fmt: skip
NEMOTRON_EXPERTS = NEMOTRON | {
    "hybrid_override_pattern": "MEM*EM-", "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
CONFIGS = {
    "nemotron_h": lambda: transformers.NemotronHConfig(**NEMOTRON),
    "nemotron_h, biases": lambda: transformers.NemotronHConfig(
        **NEMOTRON | {"n_groups": 4, "conv_kernel": 3}, use_bias=True, mlp_bias=True, use_conv_bias=False, residual_in_fp32=True
    ),
    "nemotron_h, experts": lambda: transformers.NemotronHConfig(**NEMOTRON_EXPERTS),
    "mamba": lambda: transformers.MambaConfig(**MAMBA),
    "mamba, untied, biases": lambda: transformers.MambaConfig(
        **MAMBA, conv_kernel=3, time_step_rank=5, tie_word_embeddings=False, use_bias=True, use_conv_bias=False
    ),
    "falcon_mamba": lambda: transformers.FalconMambaConfig(**MAMBA, mixer_rms_eps=0.01, tie_word_embeddings=False),
    "falcon_mamba, width of its own": lambda: transformers.FalconMambaConfig(**MAMBA | {"expand": 16}, intermediate_size=60),
    "mamba2": lambda: transformers.Mamba2Config(**MAMBA2),
    "mamba2, tied, biases": lambda: transformers.Mamba2Config(
        **MAMBA2 | {"conv_kernel": 3}, tie_word_embeddings=True, use_bias=True, use_conv_bias=False, residual_in_fp32=False
    ),
    # the norm of Transformers 5.17 takes all groups together, which we do where config.json asks for it
    "mamba2, groups": lambda: transformers.Mamba2Config(**MAMBA2 | {"n_groups": 4}, norm_groups=1),
    "bamba": lambda: transformers.BambaConfig(**BAMBA),
    "bamba, groups, biases": lambda: transformers.BambaConfig(
        **BAMBA | {"mamba_n_groups": 2, "attn_layer_indices": [0, 2]}, attention_bias=True, mlp_bias=True, mamba_proj_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3_next, dense": lambda: transformers.Qwen3NextConfig(**DELTA, head_dim=16, mlp_only_layers=[0, 1, 2]),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**DELTA, **EXPERTS, head_dim=16),
    "qwen3_next, some dense": lambda: transformers.Qwen3NextConfig(
        **DELTA, **EXPERTS, head_dim=16, mlp_only_layers=[0], norm_topk_prob=False
    ),
    "qwen3_5_moe_text": lambda: transformers.Qwen3_5MoeTextConfig(
        **{name: value for name, value in DELTA.items() if name != "intermediate_size"}, **EXPERTS, head_dim=16
    ),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**DELTA, head_dim=16),
    "qwen3_5_text, tied, biases": lambda: transformers.Qwen3_5TextConfig(
        **DELTA | {"layer_types": ["full_attention", "linear_attention", "full_attention"], "linear_conv_kernel_dim": 3},
        head_dim=8, attention_bias=True, tie_word_embeddings=True, partial_rotary_factor=0.5,
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**DELTA, rope_parameters={"rope_theta": None, "rope_type": "default"}),
    "olmo_hybrid, rotary, biases": lambda: transformers.OlmoHybridConfig(
        **DELTA | {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, attention_bias=True,
        linear_allow_neg_eigval=False,
    ),
}  # fmt: skip


def convolved(layer: Layer, x: Tensor) -> Tensor:
    """The convolution of one sequence (T, W), in fp64."""
    bias = None if layer.conv_bias is None else layer.conv_bias.double()
    taps = layer.conv_weight.double()[:, None]
    return silu(conv1d(x.double().T, taps, bias, padding=layer.sizes.kernel - 1, groups=len(taps)))[:, : len(x)].T


def mamba(layer: Layer, x: Tensor) -> Tensor:
    """Mamba-1 of one sequence (T, W), token by token, in fp64."""
    sizes, found = layer.sizes, []
    y = convolved(layer, x)
    # a rank that has a part of the channels has a part of the sum
    low, B, C = layer.placement.summed(y @ layer.select.double().T).split((sizes.rank, sizes.state, sizes.state), dim=-1)
    if sizes.selection_norms:
        weights = [norm.weight.double() for norm in layer.selection_norms]
        low, B, C = (
            weight * x * (x.square().mean(-1, keepdim=True) + sizes.selection_eps).rsqrt()
            for x, weight in zip((low, B, C), weights, strict=True)
        )
    steps = softplus(low @ layer.widen.double().T + layer.dt_bias.double())
    state, A = torch.zeros(sizes.width, sizes.state, dtype=torch.float64), -layer.A_log.double().exp()
    for t in range(len(x)):
        state = torch.exp(steps[t][:, None] * A) * state + torch.outer(steps[t] * y[t], B[t])
        found.append(state @ C[t] + layer.D.double() * y[t])
    return torch.stack(found).to(x.dtype)


def mamba2(layer: Layer, xBC: Tensor, dt: Tensor) -> Tensor:
    """Mamba-2 of one sequence (T, ...), token by token, in fp64; (T, H, P)."""
    sizes, T = layer.sizes, len(dt)
    H, P, G, N = sizes.heads, sizes.head_dim, sizes.groups, sizes.state
    x, B, C = convolved(layer, xBC).split((H * P, G * N, G * N), dim=-1)
    steps = softplus(dt.double() + layer.dt_bias.double()).clamp(*sizes.step_limit)
    state, found = torch.zeros(H, P, N, dtype=torch.float64), []
    for t in range(T):
        b, c = (part[t].view(G, N).repeat_interleave(H // G, 0) for part in (B, C))
        decay = torch.exp(-steps[t] * layer.A_log.double().exp())
        state = decay[:, None, None] * state + torch.einsum("h,hp,hn->hpn", steps[t], x[t].view(H, P), b)
        found.append(torch.einsum("hpn,hn->hp", state, c) + layer.D.double()[:, None] * x[t].view(H, P))
    return torch.stack(found).to(xBC.dtype)


def delta(layer: Layer, qkv: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """The gated delta rule of one sequence (T, ...), token by token, in fp64; (T, Hv, Dv)."""
    sizes, found = layer.sizes, []
    Hk, Hv, Dk, Dv = sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim
    q, k, v = convolved(layer, qkv).split((Hk * Dk, Hk * Dk, Hv * Dv), dim=-1)
    q, k = (x.view(-1, Hk, Dk) / (x.view(-1, Hk, Dk).square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k, v = q.repeat_interleave(Hv // Hk, 1) * Dk**-0.5, k.repeat_interleave(Hv // Hk, 1), v.view(-1, Hv, Dv)
    beta = b.double().sigmoid() * (2 if sizes.double_beta else 1)
    decay = torch.exp(-layer.A_log.double().exp() * softplus(a.double() + layer.dt_bias.double()))
    state = torch.zeros(Hv, Dk, Dv, dtype=torch.float64)
    for t in range(len(qkv)):
        state = decay[t][:, None, None] * state
        recalled = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - recalled))
        found.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(found).to(qkv.dtype)


def mixed(decoder: Decoder, lengths: Sequence[int]) -> Any:
    """Mixes tokens of sequences back to back: attention by `attention_packed`, recurrences by their definition."""
    cu = [0, *accumulate(lengths)]

    def attend(layer: int, *given: Any) -> Tensor:
        mixer = {"mamba": mamba, "mamba2": mamba2, "delta": delta}.get(decoder.config.mixers[layer])
        if mixer is not None:
            parts = [tuple(x[begin:end] for x in given) for begin, end in pairwise(cu)]
            return torch.cat([mixer(decoder.layers[layer], *part) for part in parts])
        q, k, v, rotation = given
        q, k = (x if rotation is None else rotate(x, rotation) for x in (q, k))
        window = decoder.config.windows[layer]
        mask = rooftile.CAUSAL if window is None else rooftile.CAUSAL & rooftile.Window(window - 1)
        return rooftile.attention_packed(
            q, k, v, torch.tensor(cu), torch.tensor(cu), mask, scale=decoder.config.scale, sinks=decoder.layers[layer].sinks
        )

    return attend


def logits_of_ours(decoder: Decoder, sequences: Sequence[Tensor]) -> Tensor:
    """(total, vocab) in fp32: all sequences at once, back to back."""
    positions = torch.cat([torch.arange(len(x)) for x in sequences])
    with torch.inference_mode():
        hidden = decoder(torch.cat(list(sequences)), positions, mixed(decoder, [len(x) for x in sequences]))
        return decoder.logits(hidden).float()
