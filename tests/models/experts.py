"""Tiny models of Transformers whose layers have experts, and a DeepSeekMoE of our own, for which it has no class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip
THETA = {"rope_type": "default", "rope_theta": 500.0}
QWEN = SMALL | {"moe_intermediate_size": 20, "num_experts": 7, "num_experts_per_tok": 3, "head_dim": 16}
OLMOE = SMALL | {"num_experts": 6, "num_experts_per_tok": 3}
GRANITE = SMALL | {
    "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 28, "mamba_n_heads": 8,
    "mamba_d_state": 12, "mamba_chunk_size": 16, "layer_types": ["mamba", "attention", "mamba", "attention"],
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5,
}  # fmt: skip
GLM = SMALL | {"moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3}
GPT_OSS = SMALL | {
    "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3,
    "sliding_window": 7,
}  # fmt: skip
JAMBA = SMALL | {
    "num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
    "mamba_d_state": 6, "use_mamba_kernels": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=5),
    "mixtral, windows, wide heads": lambda: transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=1, sliding_window=7, head_dim=16, tie_word_embeddings=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**QWEN, norm_topk_prob=True),
    "qwen3_moe, some dense": lambda: transformers.Qwen3MoeConfig(
        **QWEN | {"num_hidden_layers": 4}, decoder_sparse_step=2, mlp_only_layers=[3], attention_bias=True,
        use_sliding_window=True, sliding_window=6, max_window_layers=2,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**OLMOE),
    "olmoe, clipped": lambda: transformers.OlmoeConfig(**OLMOE, clip_qkv=0.7, norm_topk_prob=True, attention_bias=True),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**GLM, head_dim=8),
    "glm4_moe, norms, biases": lambda: transformers.Glm4MoeConfig(
        **GLM, head_dim=16, use_qk_norm=True, attention_bias=True, n_group=4, topk_group=2, routed_scaling_factor=1.7,
        first_k_dense_replace=2,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(**GRANITE),
    "granitemoehybrid, rope, groups": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE | {"mamba_n_groups": 2, "mamba_conv_bias": False, "mamba_d_conv": 3}, position_embedding_type="rope",
        attention_bias=True, mamba_proj_bias=True, rope_parameters=THETA,
    ),
    "granitemoehybrid, dense": lambda: transformers.GraniteMoeHybridConfig(
        **GRANITE | {"num_local_experts": 0}, tie_word_embeddings=True
    ),
    "jamba": lambda: transformers.JambaConfig(**JAMBA),
    "jamba, biases": lambda: transformers.JambaConfig(
        **JAMBA | {"mamba_dt_rank": 5, "mamba_d_conv": 3}, mamba_proj_bias=True, mamba_conv_bias=False, tie_word_embeddings=True
    ),
    "jamba, dense": lambda: transformers.JambaConfig(**JAMBA | {"num_experts": 1, "num_experts_per_tok": 1}),
    "gpt_oss": lambda: transformers.GptOssConfig(**GPT_OSS, rope_parameters=YARN),
    "gpt_oss, default positions": lambda: transformers.GptOssConfig(
        **GPT_OSS | {"hidden_size": 40, "intermediate_size": 24}, attention_bias=False,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "moe_intermediate_size": 12, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu",
    "aux_loss_alpha": 0.001, "seq_aux": True, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "model_type": "deepseek",
    "architectures": ["DeepseekForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
    "torch_dtype": "float32",
}  # fmt: skip


class DeepSeek:
    """A DeepSeekMoE with random weights by the names of its checkpoints, in fp64: arXiv:2401.06066, equations 9 to 11."""

    def __init__(self, config: dict[str, Any], seed: int = 7) -> None:
        self.config, self.weights = config, dict[str, Tensor]()
        generator = torch.Generator().manual_seed(seed)

        def new(name: str, *size: int) -> None:
            drawn = torch.randn(size, generator=generator)
            self.weights[f"{name}.weight"] = 1 + 0.3 * drawn if len(size) == 1 else 0.2 * drawn

        d, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
        dim = d // heads
        new("model.embed_tokens", config["vocab_size"], d)
        for n in range(config["num_hidden_layers"]):
            layer = f"model.layers.{n}"
            for name, rows in (("q", heads), ("k", kv), ("v", kv)):
                new(f"{layer}.self_attn.{name}_proj", rows * dim, d)
            new(f"{layer}.self_attn.o_proj", d, heads * dim)
            for name in ("input_layernorm", "post_attention_layernorm"):
                new(f"{layer}.{name}", d)
            widths = {f"{layer}.mlp": config["intermediate_size"]}
            if self.has_experts(n):
                new(f"{layer}.mlp.gate", config["n_routed_experts"], d)
                width = config["moe_intermediate_size"]
                widths = {f"{layer}.mlp.experts.{e}": width for e in range(config["n_routed_experts"])}
                if config["n_shared_experts"]:
                    widths[f"{layer}.mlp.shared_experts"] = config["n_shared_experts"] * width
            for name, width in widths.items():
                new(f"{name}.gate_proj", width, d)
                new(f"{name}.up_proj", width, d)
                new(f"{name}.down_proj", d, width)
        new("model.norm", d)
        new("lm_head", config["vocab_size"], d)

    def has_experts(self, n: int) -> bool:
        return n >= self.config["first_k_dense_replace"] and n % self.config["moe_layer_freq"] == 0

    def save(self, folder: Path) -> Path:
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder

    def logits(self, ids: Tensor) -> Tensor:
        """(T, vocab) in fp64, of one sequence (T,)."""
        stream = self._of("model.embed_tokens")[ids]
        for n in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{n}"
            stream = stream + self._attention(f"{layer}.self_attn", self._normalised(f"{layer}.input_layernorm", stream))
            x = self._normalised(f"{layer}.post_attention_layernorm", stream)
            stream = stream + (self.experts(f"{layer}.mlp", x) if self.has_experts(n) else self._dense(f"{layer}.mlp", x))
        return self._normalised("model.norm", stream) @ self._of("lm_head").T

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Returns the greedy continuations; the whole sequence is computed anew for each token."""
        found = []
        for prompt in prompts:
            ids = torch.tensor(prompt)
            for _ in range(tokens):
                ids = torch.cat((ids, self.logits(ids)[-1:].argmax(-1)))
            found.append(ids[len(prompt) :].tolist())
        return found

    def experts(self, name: str, x: Tensor) -> Tensor:
        """The sum of the shared experts and of the best routed ones, each times its softmax over all."""
        scores = (x @ self._of(f"{name}.gate").T).softmax(-1)
        rows = []
        for token, score in zip(x, scores, strict=True):
            gates, best = score.topk(self.config["num_experts_per_tok"])
            if self.config["norm_topk_prob"]:
                gates = gates / gates.sum()
            rows.append(sum(g * self._dense(f"{name}.experts.{e}", token) for g, e in zip(gates, best.tolist(), strict=True)))
        y = torch.stack(rows)
        return y + self._dense(f"{name}.shared_experts", x) if self.config["n_shared_experts"] else y

    def _of(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"].double()

    def _normalised(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * self._of(name)

    def _dense(self, name: str, x: Tensor) -> Tensor:
        inner = functional.silu(x @ self._of(f"{name}.gate_proj").T) * (x @ self._of(f"{name}.up_proj").T)
        return inner @ self._of(f"{name}.down_proj").T

    def _attention(self, name: str, x: Tensor) -> Tensor:
        heads, T = self.config["num_attention_heads"], len(x)
        q, k, v = ((x @ self._of(f"{name}.{part}_proj").T).unflatten(-1, (-1, 10)).transpose(0, 1) for part in "qkv")
        q, k = self._rotated(q), self._rotated(k)
        k, v = (each.repeat_interleave(heads // len(each), 0) for each in (k, v))
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = (q @ k.mT * 10**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return (scores @ v).transpose(0, 1).flatten(1) @ self._of(f"{name}.o_proj").T

    def _rotated(self, x: Tensor) -> Tensor:
        """Halves of a head rotate against each other."""
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * rates
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
