"""Other libraries' names for arguments of attention over users' events, and what to write in their place."""

from __future__ import annotations

_OFFSETS = "write cu=, the offsets of users"
_MASK = "write mask=, made of CAUSAL, Window, Prefix, Chunk and Targets; there is no mask of pairs"
_LENGTH = "leave it out: no length is padded to; the reference implementation's division by it is scale=1 / length"
_PACKED = "write {}=, packed (total, heads, head_dim), and cu= with the offsets of users"
_MASKS = ("attn_mask", "attention_mask", "invalid_attn_mask")
_COMMON = dict.fromkeys(("seq_offsets", "x_offsets", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "seqlen_offsets"), _OFFSETS)
# names of generative-recommenders, and names in the CUDA kernels that are called hstu_attn
HSTU = {
    **_COMMON,
    **dict.fromkeys(_MASKS, _MASK),
    **dict.fromkeys(("causal", "is_causal"), "write mask=rooftile.CAUSAL, which it is if nothing is said, or rooftile.FULL"),
    "query": _PACKED.format("q"), "key": _PACKED.format("k"), "value": _PACKED.format("v"),
    **dict.fromkeys(("max_seq_len", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "N"), _LENGTH),
    **dict.fromkeys(("num_targets", "seqused_targets"), "write targets="),
    **dict.fromkeys(("contextual_seq_len", "num_contexts", "num_contextual_tokens"), "write contextual="),
    "max_attn_len": "write mask=rooftile.CAUSAL & rooftile.Window(n - 1): n counts the event itself, Window does not",
    **dict.fromkeys(
        ("rab", "rel_attn_bias", "attn_bias", "attn_bias_mask"),
        "write bias=, a rooftile.recommend.RelativeBias of tables; there is no bias of pairs",
    ),
    **dict.fromkeys(("timestamps", "all_timestamps", "seq_timestamps"), "write times="),
    **dict.fromkeys(("dropout_pr", "dropout_p", "attn_dropout_ratio"), "leave it out: there is no dropout of weights"),
    "training": "leave it out: there is no dropout, so training computes the same",
    "attn_scale": "write scale=",
}  # fmt: skip
TARGET = {
    **_COMMON,
    **dict.fromkeys(("query", "queries", "candidates", "target"), "write q=, the candidates (B, M, heads, head_dim)"),
    **dict.fromkeys(
        ("facts", "history", "sequence", "key", "k"), "write keys=, all users' events (total, heads, head_dim), with cu="
    ),
    **dict.fromkeys(("value", "v"), "write values="),
    **dict.fromkeys(("topk", "k_events"), "write top_k="),
    "attn_bias": "write bias=, a number per event and head; there is no bias of pairs",
    **dict.fromkeys(
        ("mask", "causal", "is_causal", *_MASKS),
        "leave it out: a candidate reads all events of its user, and cu= says where users begin",
    ),
    "softmax": "write weights='softmax', 'silu' or 'sigmoid'",
}
