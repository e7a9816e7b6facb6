"""Attention of Hugging Face Transformers: attn_implementation="rooftile".

    import rooftile    # registers the name, in either order with transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rooftile")
    model.set_attn_implementation("paged|rooftile")     # for generate_batch: continuous batching

`attention` here runs what `transformers_mask.mask` prepared: padding is removed before and its outputs are zeros,
sequences packed in one row do not see each other, and a dense mask becomes a bias on the scores. Weights are never
stored, so output_attentions is refused.

The host waits for the GPU once per forward to learn whether there is padding (as in Transformers' own masks) or whether
position_ids restart, and once more if so. Later layers read the answer from the mask. Single queries without
attention_mask, and compiled code, never wait.

Transformers silently drops the padding mask for an implementation without a mask function, and treats every name that
contains "flash" as its own. So both functions are registered, as "rooftile".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile import api
from rooftile.errors import InvalidInput, Unsupported
from rooftile.integrations import transformers_mask
from rooftile.masks import CAUSAL, FULL, Chunk, Mask, Window
from rooftile.ops.unpad import put_rows, take_rows

NAME = "rooftile"
PAGED = f"paged|{NAME}"

# arguments that change the mask or the result in ways that are not implemented here
_REFUSED = {
    "block_indices": "sparse attention by block_indices",
    "block_table": "a paged cache",
    "cache": 'continuous batching, which has "paged|rooftile",',
    "head_mask": "head_mask",
    "indices": "sparse attention by indices",
    "output_attentions": "output_attentions=True (the weights are never stored)",
}
_NOT_PASSED: Any = object()


def register() -> None:
    """Registers attn_implementation="rooftile" with Transformers, which it imports. Calling it again is harmless."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(PAGED, attention_paged)
    AttentionMaskInterface.register(NAME, transformers_mask.mask)
    # without it, decoding fails on the shape of a mask that this module does not read
    AttentionMaskInterface.register(PAGED, _no_mask)


# whether `rooftile.disable` was called last
_disabled = False


def enable() -> None:
    """Undo `disable`. The name itself is registered when Rooftile and Transformers' models are imported."""
    global _disabled
    _disabled = False


def disable() -> None:
    """Refuse calls of models with attn_implementation="rooftile", until `enable`."""
    global _disabled
    _disabled = True


def _check_enabled(name: str) -> None:
    if _disabled:
        raise Unsupported(
            f'attn_implementation="{name}" ran after rooftile.disable(); call rooftile.enable(), or '
            'model.set_attn_implementation("sdpa")'
        )


def attention(
    module: torch.nn.Module,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hk, S, D)
    value: Tensor,  # (B, Hk, S, Dv)
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_k: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    s_aux: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = _NOT_PASSED,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that Transformers' models call. Returns o (B, T, H, Dv), and None for the weights.

    Raises:
        Unsupported: an argument asks for something that Rooftile does not support.
        InvalidInput: the mask cannot be interpreted.
    """
    _check_enabled(NAME)
    for name, what in _REFUSED.items():
        if others.get(name) is not None and others[name] is not False:
            raise Unsupported(f'{what} is not for attn_implementation="rooftile"; use "sdpa" or "eager" here')
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = {"dropout": dropout, "scale": scaling, "sinks": s_aux, "softcap": softcap}
    if attention_mask is not None and attention_mask.ndim == 4:
        return api.attention(q, k, v, bias=_added(attention_mask, position_bias, q.dtype), **options), None

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        causal = _check_mask(attention_mask, causal, q, k)
    config = getattr(module, "config", None)
    pattern = _pattern_of(config, getattr(module, "layer_idx", None), causal, sliding_window, k.shape[1])
    packing = None
    if attention_mask is not None:
        packing = _unpadding(attention_mask, q.shape[1], pattern, config)
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        packing = _Packing(None, None, cu_seq_lens_q, cu_seq_lens_k)
    elif causal and position_ids is not None:
        packing = _restarts(position_ids, q, k)
    if packing is None:
        return api.attention(q, k, v, pattern, bias=position_bias, **options), None
    if position_bias is not None:
        raise Unsupported(
            'position_bias came with padding or packed sequences to attn_implementation="rooftile", which takes it for '
            'batches without padding; use "sdpa" or "eager" here'
        )
    return _packed(q, k, v, pattern, packing, options), None


def attention_paged(
    module: torch.nn.Module,
    query: Tensor,  # (1, H, total_q, D)
    key: Tensor,  # (1, Hk, total_q, D)
    value: Tensor,  # (1, Hk, total_q, Dv)
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    cu_seq_lens_k: Any = None,  # (B + 1,), or by the type of layer
    cu_seq_lens_q: Tensor | None = None,
    read_index: Any = None,
    s_aux: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    write_index: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of Transformers' continuous batching: packed sequences against its own paged KV cache.

    The cache stores the new keys and values, and returns all that each sequence sees. Returns o (1, total_q, H, Dv), and None.

    Raises:
        Unsupported: called outside continuous batching.
    """
    _check_enabled(PAGED)
    if cache is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise Unsupported('attn_implementation="paged|rooftile" is for generate_batch; use "rooftile" for generate and training')
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k = cu_seq_lens_k["sliding_attention" if sliding_window else "full_attention"]
    k, v = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index, write_index=write_index
    )
    q = query[0].transpose(0, 1)
    o = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    # rows past the last sequence are padding
    rows, keys = q.shape[0], k.shape[0]
    if q.device.type == "cpu":
        rows, keys = int(cu_seq_lens_q[-1]), int(cu_seq_lens_k[-1])
    # Transformers counts the query itself
    mask = CAUSAL & Window(sliding_window - 1) if sliding_window else CAUSAL
    options = {"scale": scaling, "sinks": s_aux, "softcap": softcap}
    cu = cu_seq_lens_q.int(), cu_seq_lens_k.int()
    o[:rows] = api.attention_packed(q[:rows], k[:keys], v[:keys], *cu, mask, **options)
    return o[None], None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _check_mask(attention_mask: Tensor, causal: bool, q: Tensor, k: Tensor) -> bool:
    """Whether this 2-D mask means causal attention."""
    due = (k.shape[0], k.shape[1])
    if attention_mask.dtype not in (torch.bool, torch.int32) or tuple(attention_mask.shape) != due:
        raise InvalidInput(
            f"attention_mask is {attention_mask.dtype} {tuple(attention_mask.shape)}; must have 4 axes, or be {due} "
            'and made by Transformers\' mask functions; use attn_implementation="sdpa" for a model that makes its own'
        )
    if attention_mask.dtype == torch.bool and causal and q.shape[1] > 1:
        raise InvalidInput(
            "attention_mask is bidirectional and the attention module is causal; set is_causal of the module to False, "
            'or use attn_implementation="sdpa"'
        )
    return attention_mask.dtype == torch.int32


def _pattern_of(config: Any, layer: int | None, causal: bool, sliding_window: int | None, S: int) -> Mask:
    """Returns the mask for a call, from its arguments and the type of its layer."""
    types = getattr(config, "layer_types", None)
    kind = types[layer] if types is not None and layer is not None and layer < len(types) else None
    pattern = CAUSAL if causal else FULL
    if kind == "chunked_attention":
        pattern = pattern & Chunk(config.attention_chunk_size)
    if sliding_window is _NOT_PASSED:
        has_window = causal and kind in (None, "sliding_attention")
        sliding_window = getattr(config, "sliding_window", None) if has_window else None
        if sliding_window and kind is None and sliding_window < S:
            raise Unsupported(
                f"config.sliding_window is {sliding_window}, and this model does not name the layers that have it; use "
                'attn_implementation="sdpa"'
            )
    if not sliding_window:
        return pattern
    # Transformers counts the query itself; encoders also see as far ahead
    return pattern & Window(sliding_window - 1, None if causal else sliding_window - 1)


def _added(attention_mask: Tensor, position_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Combines a dense mask (1|B, 1|H, T, S), bool or additive, and the bias into one bias."""
    if attention_mask.dtype == torch.bool:
        hidden = ~attention_mask
        attention_mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        attention_mask = attention_mask.masked_fill_(hidden, torch.finfo(dtype).min)
    return attention_mask if position_bias is None else attention_mask + position_bias


class _Packing(NamedTuple):
    """The real tokens of a padded batch: indices into (B T,) and (B S,), None for all; and their offsets."""

    queries: Tensor | None
    keys: Tensor | None
    cu_q: Tensor
    cu_k: Tensor


def _packed(q: Tensor, k: Tensor, v: Tensor, pattern: Mask, packing: _Packing, options: dict[str, Any]) -> Tensor:
    """Computes attention (B, T, H, Dv) on the real tokens; padded queries get zeros."""
    B, T = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    if packing.queries is not None:
        q = take_rows(q, packing.queries)
    if packing.keys is not None:
        k, v = (take_rows(x, packing.keys) for x in (k, v))
    o = api.attention_packed(q, k, v, packing.cu_q, packing.cu_k, pattern, **options)
    if packing.queries is not None:
        o = put_rows(o, packing.queries, B * T)
    return o.unflatten(0, (B, T))


def _unpadding(attention_mask: Tensor, T: int, pattern: Mask, config: Any) -> _Packing:
    """Returns the packing for a 2-D mask. The first layer of a forward computes it and stores it on the mask."""
    B, S = attention_mask.shape
    is_bool = attention_mask.dtype == torch.bool
    of_keys_only = is_bool and (T != S or (pattern == FULL and not _only_attends_to_itself(config)))
    kept = attention_mask.__dict__.setdefault("_rooftile", {})
    if (T, of_keys_only) not in kept:
        sequences = attention_mask
        if is_bool:
            rows = torch.arange(1, B + 1, dtype=torch.int32, device=attention_mask.device)
            sequences = rows[:, None] * attention_mask
        packing = _packing_of(sequences, T)
        if of_keys_only:
            cu_q = T * torch.arange(B + 1, dtype=torch.int32, device=attention_mask.device)
            packing = packing._replace(queries=None, cu_q=cu_q)
        kept[T, of_keys_only] = packing
    return kept[T, of_keys_only]


def _packing_of(sequences: Tensor, T: int) -> _Packing:
    """Builds the packing from the sequence number of each key slot (B, S), as in `transformers_mask`, and T."""
    slots = (sequences >= 0).sum(1, keepdim=True) - T + torch.arange(T, device=sequences.device)
    of_queries = sequences.gather(1, slots.clamp(min=0))  # (B, T)
    count = int(sequences.max()) if sequences.numel() else 0
    indices, offsets = [], []
    for numbers in (of_queries, sequences):
        there = numbers.flatten().clamp(min=0)
        lengths = torch.bincount(there, minlength=count + 1)[1:]
        indices.append(there.nonzero()[:, 0])
        offsets.append(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32))
    return _Packing(*indices, *offsets)


def _restarts(position_ids: Tensor, q: Tensor, k: Tensor) -> _Packing | None:
    """Returns the packing of rows (B, T) whose position_ids restart, or None if none does.

    Without a cache, Transformers detects these itself, and the mask contains them; with a cache it does not.
    """
    B, T = q.shape[:2]
    if T == 1 or k.shape[1] != T or position_ids.shape not in ((1, T), (B, T)) or torch.compiler.is_compiling():
        return None
    if position_ids.is_inference():
        # such tensors do not count their changes, so no answer can be kept for later layers
        return _packing_of_positions(position_ids, B)
    kept = position_ids.__dict__.setdefault("_rooftile", {})
    if (B, position_ids._version) not in kept:
        kept[B, position_ids._version] = _packing_of_positions(position_ids, B)
    return kept[B, position_ids._version]


def _packing_of_positions(position_ids: Tensor, B: int) -> _Packing | None:
    first = position_ids[:, :1]
    starts = torch.diff(position_ids, prepend=first - 1, dim=-1) != 1
    # other jumps of positions (images in text) stay in one sequence
    if not bool((starts & (position_ids == first)).any()) or not bool((position_ids == first)[starts].all()):
        return None
    rows = starts.cumsum(1).expand(B, position_ids.shape[1])
    return _packing_of(transformers_mask.numbered(rows), rows.shape[1])


def _only_attends_to_itself(config: Any) -> bool:
    """Whether a model has no cross-attention. With it, the padding of keys would not apply to queries."""
    said = (getattr(config, name, None) for name in ("is_decoder", "add_cross_attention", "is_encoder_decoder"))
    return all(value is False for value in said)
