"""The words of other libraries, and our own of earlier: what to write in their place. `words` answers with them."""

from __future__ import annotations

AMERICAN = {
    "attention_quantized": "attention_quantised",
    "attention_quantized_with_lse": "attention_quantised_with_lse",
    "quantize_qkv": "quantise_qkv",
    "quantize_model": "quantise_model",
    "quantize_weight": "quantise_weight",
    "QuantizedWeight": "QuantisedWeight",
}

_LAYOUT = "write {}=, in the layout (B, T, H, D): x.transpose(1, 2) of (B, H, T, D) costs no copy"
_CAUSAL = "write mask=rooftile.CAUSAL; it is aligned bottom-right: the last query sees the last key"
_BIAS = "write bias=, which broadcasts to (B, H, T, S): numbers to add to the scores, or booleans, True where a key is seen"
_LSE = "write o, lse = rooftile.attention_with_lse(q, k, v, mask)"
_GROUPS = "leave it out: fewer heads of k and v than of q are always grouped"
_LENGTHS = "leave it out: the offsets cu_q and cu_k are enough"
_CACHE = "write rooftile.attention_paged(q, rooftile.kvcache.PagedKV(...), mask), or use rooftile.integrations.flash_attn"
_SCALES = "write precision='fp8', which computes the scales, or rooftile.quantise_qkv and rooftile.attention_quantised"
_TUNING = "leave it out: a backend chooses its own tiles; backend= names a backend"
_CALL = "write rooftile.attention(q, k, v, mask) in the layout (B, T, H, D), or call rooftile.enable()"

# words of flash-attn, torch's SDPA, FlexAttention, MultiheadAttention, xformers and Transformers -> what to do here
ARGUMENTS = {
    # our own words of earlier
    "block": "write block_size=", "size": "write block_size=", "w": "write weight=", "b": "write bias=",
    "stream": "write residual=", "heads": "write sets=", "weight": "write commitment=",
    "fused": "leave it out: a step is always one pass on a GPU with Triton",
    "foreach": "leave it out: a step is always one pass on a GPU with Triton",
    "max_grad_norm": "write clip_norm=",
    "group_size": "write group=",
    "filter_fn": "write skip= with patterns of the names that stay, or format={pattern: word}",
    **dict.fromkeys(("ignore", "modules_to_not_convert"), "write skip= with patterns of the names that stay"),
    **dict.fromkeys(
        ("config", "base_config", "weight_config", "scheme", "quantization_config", "weight_dtype", "bits", "num_bits"),
        "write the format as a word, such as 'int4:32', or {pattern of names: word}",
    ),
    "activation_config": "leave it out: fp8, fp8_tile and int8 round activations, and activations='mxfp4' does for that format",
    "targets": "write format={pattern of names: word}",
    "granularity": "write the group into the word, as in 'int4:32' or 'int4:row'",
    "inplace": "leave it out: the model is changed in place",
    **dict.fromkeys(("input_ids", "pixel_values", "inputs_embeds"), "inputs come by position: rooftile.plan(model, x)"),
    "query": _LAYOUT.format("q"), "key": _LAYOUT.format("k"), "value": _LAYOUT.format("v"),
    "queries": _LAYOUT.format("q"), "keys": _LAYOUT.format("k"), "values": _LAYOUT.format("v"),
    "qkv": "write q, k, v = qkv.unbind(dim=2)", "kv": "write k, v = kv.unbind(dim=2)",
    "is_causal": _CAUSAL, "causal": _CAUSAL,
    "attn_mask": _BIAS, "attn_bias": _BIAS, "attention_mask": _BIAS,
    "key_padding_mask": "rooftile.attention and rooftile.attention_with_lse take it; packed sequences have no padding",
    "dropout_p": "write dropout=", "p": "write dropout=", "attn_dropout": "write dropout=",
    "softmax_scale": "write scale=", "sm_scale": "write scale=", "scaling": "write scale=",
    "logits_soft_cap": "write softcap=", "logit_cap": "write softcap=",
    "alibi_slopes": "write alibi=",
    "learnable_sink": "write sinks=", "s_aux": "write sinks=",
    "window_size": "write mask=rooftile.Window(left, right), None for no bound, and & rooftile.CAUSAL under a causal mask",
    "sliding_window": "write mask=rooftile.CAUSAL & rooftile.Window(n - 1): n counts the query itself, Window does not",
    "attention_chunk": "write mask=rooftile.CAUSAL & rooftile.Chunk(n)",
    "score_mod": "there is no function of scores: softcap=, alibi= and bias= change them",
    "mask_mod": "there is no function of positions: join Window, Prefix, Chunk and CAUSAL by &, or pass a BlockMask as mask=",
    "block_mask": "write mask=, which takes a BlockMask; Window, Prefix, Chunk and CAUSAL, joined by &, store nothing",
    "enable_gqa": _GROUPS, "pack_gqa": _GROUPS,
    "return_lse": _LSE, "return_aux": _LSE, "return_softmax_lse": _LSE,
    "return_attn_probs": f"the weights are never stored; for lse {_LSE}",
    "need_weights": f"the weights are never stored; for lse {_LSE}",
    "average_attn_weights": f"the weights are never stored; for lse {_LSE}",
    "cu_seqlens_q": "write rooftile.attention_packed(q, k, v, cu_q, cu_k, mask)",
    "cu_seqlens_k": "write rooftile.attention_packed(q, k, v, cu_q, cu_k, mask)",
    "cu_seqlens": "write rooftile.attention_packed(q, k, v, cu, cu, mask)",
    "max_seqlen_q": _LENGTHS, "max_seqlen_k": _LENGTHS, "max_seqlen": _LENGTHS,
    "seqused_q": _CACHE, "seqused_k": _CACHE, "leftpad_k": _CACHE,
    "block_table": _CACHE, "page_table": _CACHE, "k_cache": _CACHE, "v_cache": _CACHE, "cache_seqlens": _CACHE,
    "cache_batch_idx": _CACHE, "cache_leftpad": _CACHE, "rotary_cos": _CACHE, "rotary_sin": _CACHE, "rotary_interleaved": _CACHE,
    "k_new": _CACHE, "v_new": _CACHE, "cu_seqlens_k_new": _CACHE, "rotary_seqlens": _CACHE,
    "q_descale": _SCALES, "k_descale": _SCALES, "v_descale": _SCALES,
    "num_splits": _TUNING, "kernel_options": _TUNING, "op": _TUNING, "scheduler_metadata": _TUNING, "sm_margin": _TUNING,
    "qv": "there is no second query: concatenate it with q, and the values with k, along the head dim",
    "output_dtype": "leave it out: o has the dtype of q; write .to(dtype) after the call",
    "embed_dim": "write dim=", "hidden_size": "write dim=", "d_model": "write dim=",
    "num_heads": "write heads=", "num_attention_heads": "write heads=", "n_heads": "write heads=",
    "num_kv_heads": "write kv_heads=", "num_key_value_heads": "write kv_heads=", "n_kv_heads": "write kv_heads=",
    **dict.fromkeys(("topk", "top_k", "num_experts_per_tok", "num_experts_per_token", "moe_router_topk"), "write active="),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "num_moe_experts"), "write experts="),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), "write shared="),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"), "write hidden="),
    **dict.fromkeys(("norm_topk_prob", "renormalize", "norm_topk"), "write normalise="),
    **dict.fromkeys(("n_group", "num_expert_group", "num_expert_groups"), "write groups="), "topk_group": "write active_groups=",
    **dict.fromkeys(("scoring_func", "score_func", "score_function"), "write score="), "routed_scaling_factor": "write scale=",
    "e_score_correction_bias": "write bias=", "aux_loss_alpha": "write alpha=", "router_aux_loss_coef": "write alpha=",
    **dict.fromkeys(("gate_up_proj", "w13", "w1"), "write up="), **dict.fromkeys(("down_proj", "w2"), "write down="),
    **dict.fromkeys(
        ("topk_ids", "topk_weights", "top_k_index", "top_k_weights", "router_indices", "routing_weights"),
        "write routing=, a rooftile.moe.Routing(experts, gates)",
    ),
    "hidden_act": "write activation=", "hidden_states": "write u=", "router_logits": "write u= and centroids=",
    "kdim": "write context_dim=, of keys and values alike", "vdim": "write context_dim=, of keys and values alike",
    "batch_first": "leave it out: the layout is always (B, T, dim)",
    "add_bias_kv": "there is none; sinks=True has a learned logit per head",
    "add_zero_attn": "there is none; sinks of zeros give the same",
}  # fmt: skip

NAMES = {
    **{
        name: f"write from rooftile.integrations.flash_attn import {name}"
        for name in (
            "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
            "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
        )
    },
    "scaled_dot_product_attention": _CALL, "sdpa": _CALL,
    "flex_attention": "write from rooftile.integrations.flex_attention import flex_attention",
    "memory_efficient_attention": "write rooftile.attention(q, k, v, mask)",
    "create_block_mask": "write from torch.nn.attention.flex_attention import create_block_mask; mask= takes what it returns",
    "BlockMask": "write from torch.nn.attention.flex_attention import BlockMask; mask= takes one", "and_masks": "join masks by &",
    "or_masks": "there is no union of masks: write a boolean bias=, or merge two calls over disjoint keys",
    "LowerTriangularMask": "write rooftile.CAUSAL", "causal": "write rooftile.CAUSAL", "Causal": "write rooftile.CAUSAL",
    "Full": "write rooftile.FULL", "SlidingWindow": "write rooftile.Window", "Sliding": "write rooftile.Window",
    "PrefixLM": "write rooftile.Prefix", "BlockDiagonalMask": "write rooftile.attention_packed(q, k, v, cu_q, cu_k)",
    "MultiheadAttention": "write rooftile.nn.Attention(dim, heads)", "Attention": "write rooftile.nn.Attention(dim, heads)",
    "quantise": "write rooftile.numerics.quantise", "quantize": "write rooftile.numerics.quantise",
    "quantise_blocks": "write rooftile.numerics.quantise_blocks", "quantize_blocks": "write rooftile.numerics.quantise_blocks",
    "PagedKV": "write from rooftile.kvcache import PagedKV",
}  # fmt: skip


# words for formats of torchao, llm-compressor, bitsandbytes and PyTorch, in lower case -> the word here
FORMATS = {
    **dict.fromkeys(("w4a16", "int4_weight_only", "int4wo", "torch.int4", "torch.uint4", "nf4", "gptq", "awq"), "int4"),
    **dict.fromkeys(("w8a16", "int8_weight_only", "int8wo"), "w8"),
    **dict.fromkeys(("w8a8", "int8_dynamic_activation_int8_weight", "int8dq", "torch.int8", "i8"), "int8"),
    **dict.fromkeys(("fp8_dynamic", "float8", "float8dq", "float8_e4m3fn", "torch.float8_e4m3fn", "e4m3"), "fp8"),
    "fp8_block": "fp8_tile", "nvfp4a16": "nvfp4", "mxfp4a16": "mxfp4", "fp4": "nvfp4",
    "int4weightonlyconfig": "int4", "int8weightonlyconfig": "w8", "int8dynamicactivationint8weightconfig": "int8",
    "float8dynamicactivationfloat8weightconfig": "fp8", "nvfp4dynamicactivationnvfp4weightconfig": "nvfp4",
    "nvfp4inferenceconfig": "nvfp4", "mxfpinferenceconfig": "mxfp8", "mxdynamicactivationmxweightconfig": "mxfp8",
}  # fmt: skip
