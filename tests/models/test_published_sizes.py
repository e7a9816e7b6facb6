"""Settings of published models with experts or Mamba-1: they are read, and the decoder has as many weights as the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooftile.models import Decoder
from rooftile.models.config import config_of

COMMON = {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096,
    "truncate": False,
}  # fmt: skip
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "Mixtral 8x7B": (46.70, {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 32768, "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": None,
    }),
    "Qwen3 30B-A3B": (30.53, {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "max_position_embeddings": 40960, "use_sliding_window": False, "max_window_layers": 48,
    }),
    "OLMoE 1B-7B": (6.92, {
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "clip_qkv": None,
        "max_position_embeddings": 4096,
    }),
    "DeepSeekMoE 16B": (16.38, {
        "model_type": "deepseek", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 28,
        "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "max_position_embeddings": 4096,
    }),
    # a layer of MTP is no part of the decoder
    "GLM-4.5-Air": (106.85, {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "moe_intermediate_size": 1408, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "topk_group": 1,
        "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "max_position_embeddings": 131072, "num_nextn_predict_layers": 1,
    }),
    "GLM-4.7-Flash": (29.94, {
        "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 47, "moe_intermediate_size": 1536, "num_attention_heads": 20, "num_key_value_heads": 20,
        "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "v_head_dim": 256, "routed_scaling_factor": 1.8, "rope_theta": 1e6, "max_position_embeddings": 202752,
        "num_nextn_predict_layers": 1, "topk_method": "noaux_tc", "norm_topk_prob": True,
    }),
    "MiMo 7B": (7.62, {
        "model_type": "mimo", "vocab_size": 151680, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attention_bias": True, "use_sliding_window": False,
        "max_position_embeddings": 32768, "rope_theta": 640000, "num_nextn_predict_layers": 1,
    }),
    "gpt-oss 20B": (20.91, {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "experts_per_token": 4, "max_position_embeddings": 131072, "rope_scaling": YARN, "rope_theta": 150000,
        "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
    }),
    "Granite 4.0 H Small": (32.21, {
        "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 768,
        "shared_intermediate_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "layer_types": ["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)], "mamba_d_state": 128,
        "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128, "mamba_d_head": 64, "logits_scaling": 16,
        "position_embedding_type": "nope", "max_position_embeddings": 131072, "tie_word_embeddings": True,
    }),
    "Jamba": (51.57, {
        "model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2, "mamba_dt_rank": 256,
        "max_position_embeddings": 262144,
    }),
    "Falcon-Mamba 7B": (7.27, {
        "model_type": "falcon_mamba", "vocab_size": 65024, "hidden_size": 4096, "intermediate_size": 8192, "expand": 16,
        "num_hidden_layers": 64, "state_size": 16, "time_step_rank": 256, "tie_word_embeddings": False,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_decoder_has_as_many_weights_as_the_model(name: str) -> None:
    billions, said = PUBLISHED[name]
    decoder = Decoder(config_of(COMMON | said, "here"), dtype=torch.bfloat16, device="meta", max_len=16)
    places = dict(decoder.tensors())
    assert sum(place.numel() for place in places.values()) / 1e9 == pytest.approx(billions, abs=0.005)
