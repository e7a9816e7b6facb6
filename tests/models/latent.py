"""Tiny models of Transformers with multi-head latent attention, and what mixes their tokens, by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import transformers
from torch import Tensor

from rooftile.models import Decoder

LATENT = {
    "vocab_size": 97, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": None, "kv_lora_rank": 14, "q_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7,
    "first_k_dense_replace": 3,
}  # fmt: skip
# the factor of scores is (0.1 x 1.1 ln 4 + 1) squared beside the usual one
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7,
    "mscale_all_dim": 1.1,
}  # fmt: skip
V3 = LATENT | {
    "first_k_dense_replace": 1, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 2, "moe_intermediate_size": 12,
}  # fmt: skip
GLM_FLASH = {name: value for name, value in V3.items() if name != "first_k_dense_replace"} | {"n_group": 1, "topk_group": 1}
V2 = V3 | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7}
CONFIGS = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**V3, rope_parameters=YARN),
    "deepseek_v3, one group": lambda: transformers.DeepseekV3Config(
        **V3 | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}, norm_topk_prob=False, routed_scaling_factor=1.3
    ),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**GLM_FLASH),
    "glm4_moe_lite, two dense": lambda: transformers.Glm4MoeLiteConfig(
        **GLM_FLASH, mlp_layer_types=["dense", "dense", "sparse"], norm_topk_prob=False
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**V2, rope_parameters=YARN | {"mscale": 1.1}),
    "deepseek_v2, greedy": lambda: transformers.DeepseekV2Config(**V2 | {"topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v3, dense": lambda: transformers.DeepseekV3Config(**LATENT),
    "deepseek_v3, yarn": lambda: transformers.DeepseekV3Config(**LATENT, rope_parameters=YARN),
    "deepseek_v3, halves, biases": lambda: transformers.DeepseekV3Config(**LATENT, rope_interleave=False, attention_bias=True),
    "deepseek_v3, whole queries": lambda: transformers.DeepseekV3Config(**LATENT | {"q_lora_rank": None}),
    "deepseek_v2, dense": lambda: transformers.DeepseekV2Config(**LATENT, rope_parameters=YARN | {"mscale": 1.1}),
    "deepseek_v2, whole queries": lambda: transformers.DeepseekV2Config(**LATENT | {"q_lora_rank": None}),
}  # fmt: skip


def mixed(decoder: Decoder, lengths: Sequence[int]) -> Any:
    """Mixes tokens of sequences back to back: keys and values of all heads are made of latents, in fp64."""
    cu, config = [0, *accumulate(lengths)], decoder.config

    def attend(n: int, q: Tensor, turning: Tensor, latent: Tensor, r: Tensor) -> Tensor:
        keys, values = (x.double() for x in decoder.layers[n].by_head())
        q = torch.cat((q, turning), -1).double()
        k = torch.einsum("hnr,tr->thn", keys, latent.double())
        k = torch.cat((k, r.double()[:, None].expand(-1, config.heads, -1)), -1)
        v = torch.einsum("hvr,tr->thv", values, latent.double())
        found = []
        for begin, end in pairwise(cu):
            scores = torch.einsum("thd,shd->hts", q[begin:end], k[begin:end]) * config.scale
            hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
            found.append(torch.einsum("hts,shv->thv", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[begin:end]))
        return torch.cat(found).to(latent.dtype)

    return attend


def logits_of_ours(decoder: Decoder, sequences: Sequence[Tensor]) -> Tensor:
    """(total, vocab) in fp32: all sequences at once, back to back."""
    positions = torch.cat([torch.arange(len(x)) for x in sequences])
    with torch.inference_mode():
        hidden = decoder(torch.cat(list(sequences)), positions, mixed(decoder, [len(x) for x in sequences]))
        return decoder.logits(hidden).float()


def sums_of_latents(q: Tensor, turning: Tensor, latents: Tensor, table: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Sums of latents (B, H, rank), sequence by sequence, in fp64; zeros for a sequence without a token."""
    found = []
    for one, r, blocks, length in zip(q.double(), turning.double(), table.long(), lengths.tolist(), strict=True):
        rows = latents[blocks].flatten(0, 2)[:length].double()
        scores = torch.cat((one, r), -1) @ rows.T * scale
        found.append(scores.softmax(-1) @ rows[:, : q.shape[-1]])
    return torch.stack(found)
