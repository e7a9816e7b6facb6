"""Makes configurations of Transformers small, by the names of their attributes.

One rule serves hundreds of families: an attribute called `hidden_size` (or `d_model`, `n_embd`, ...) is a width, one called
`num_hidden_layers` (or `encoder_layers`, ...) is a depth. What no rule can know stands in `exceptions`.
"""

from __future__ import annotations

import re
from typing import Any

WIDTH, HEADS, KEY_HEADS, HEAD, INNER, VOCABULARY, POSITIONS, IMAGE, PATCH = 32, 4, 2, 8, 48, 64, 64, 32, 8

# the first pattern that matches the whole name gives the value; a list gets it in every place
RULES: tuple[tuple[str, Any], ...] = (
    (r"(num_|n_)?(key_value|kv)_heads|num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num", KEY_HEADS),
    (r".*(attention_heads|num_heads|n_heads?|num_head)|num_query_heads|.*_num_heads", HEADS),
    (r".*(head_dim|head_size|head_width|dim_head)|d_kv|kv_channels|attention_head_size", HEAD),
    (r"(.*_)?(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|d_inner|n_inner|ff_dim|mlp_dim|intermediate_dim)", INNER),
    (r".*(intermediate_size\w*|ffn_dim|ffn_size|feedforward_dim)", INNER),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|emb_dim|dim_model|hidden_width)", WIDTH),
    (r"(.*_)?(projection_dim|proj_dim|out_hidden_size|output_dim|proj_size|embedding_dim|projection_size)", WIDTH),
    (r"(num_|n_)?(.*_)?(hidden_layers|layers|n_layer|num_layers|num_blocks|n_layers|layer_num|num_layer)", 2),
    (r"encoder_layers|decoder_layers|e_layers|depth", 2),
    (r"(.*_)?vocab(ulary)?_size(_\w+)?|.*_group_vocab", VOCABULARY),
    (r"rotary_dim", HEAD),
    (r"(mamba_)?chunk_size|(mamba_|ssm_)?(d_state|state_size)", HEAD),
    (r"(.*_)?depths", 1),
    (r"hidden_sizes|embedding_sizes", WIDTH),
    (r"upsample_groups", WIDTH),
    (r"(max_|n_)?(.*_)?(position_embeddings|positions|max_seq_len|seq_length|max_sequence_length|n_ctx)", POSITIONS),
    (r"(.*_)?(image_size|img_size|input_size|frame_size)", IMAGE),
    (r"(.*_)?patch_size", PATCH),
    (r"(num_|n_)(.*_)?(experts|routed_experts|local_experts)", 4),
    (r"(num_experts_per_tok|num_experts_per_token|top_k|moe_topk|moe_top_k|moe_k|num_selected_experts)", 2),
    (r"n_shared_experts|num_shared_experts|n_group|topk_group", 1),
    (r"sliding_window|window_size|attention_window_size|local_attention", 6),
    (r"attention_chunk_size", 6),
    (r"(.*_)?lora_rank", 8),
    (r"(.*_)?(dropout|drop|dropout_rate|dropout_prob|pdrop|layerdrop|drop_rate|drop_path_rate|dropout_p)", 0.0),
    (r"mask_(time|feature)_prob|apply_spec_augment", 0.0),
)  # fmt: skip
# names that the rules match and that are no size of the model
KEPT = re.compile(r"num_feat_extract_layers|num_conv_pos_embeddings|num_adapter_layers|.*_layer_ids|.*classifier_proj_size")
_RULES = tuple((re.compile(pattern), value) for pattern, value in RULES)
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def smaller(config: Any) -> dict[str, Any]:
    """Returns what to change in a configuration to make it small, sub-configurations aside."""
    given = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    given = {name: value for name, value in given.items() if name not in getattr(config, "sub_configs", {})}
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if name in TOKENS:
            changed[name] = TOKENS[name]
        elif name.endswith("token_id") and isinstance(value, int):
            changed[name] = 3 + sum(map(ord, name)) % 8
        elif name == "rope_parameters" and isinstance(value, dict):
            changed[name] = _sections(value)
        elif not KEPT.fullmatch(name):
            due = next((due for rule, due in _RULES if rule.fullmatch(name)), None)
            if due is not None and value and _is_size(value):
                changed[name] = _in_place_of(value, due)
            elif value is None and name == "head_dim":
                changed[name] = HEAD
            elif value is None and name == "num_key_value_heads":
                changed[name] = KEY_HEADS
    if "kv_lora_rank" in given:
        # compressed keys and values are unfolded for every head
        changed["num_key_value_heads"] = HEADS
    return changed | _per_layer(given, changed)


def _per_layer(given: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """Shortens what has an entry for each layer, and keeps a layer of each kind."""
    depth = given.get("num_hidden_layers") or given.get("n_layers") or given.get("num_layers")
    lists = {k: v for k, v in given.items() if isinstance(v, list | tuple) and isinstance(depth, int) and len(v) == depth > 4}
    if not lists:
        return {}
    kinds = list(zip(*lists.values(), strict=True))
    first = sorted({str(kind): n for n, kind in reversed(list(enumerate(kinds)))}.values())[:4]
    first = first if len(first) > 1 else [0, 1]
    short = {k: type(v)(v[n] for n in first) for k, v in lists.items()}
    sized = {k: _in_place_of(short[k], changed[k][0]) for k in short if isinstance(changed.get(k), list | tuple)}
    depths = {k: len(first) for k in ("num_hidden_layers", "n_layers", "num_layers") if k in changed}
    return short | sized | depths


def _sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose sections share half a head."""
    short = {k: _sections(v) if isinstance(v, dict) else v for k, v in rope.items()}
    return short | ({"mrope_section": [2, 1, 1]} if "mrope_section" in rope else {})


def _is_size(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_size, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_place_of(value: Any, due: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_in_place_of(one, due) for one in value)
    return due
