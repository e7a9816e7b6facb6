"""Attention of Hugging Face Transformers: attn_implementation="rooftile".

    import rooftile    # registers the name, in either order with transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="rooftile")
    model.set_attn_implementation("paged|rooftile")     # for generate_batch: continuous batching

`attention` here runs what `transformers_mask.mask` decided: padding is removed before and its outputs are zeros,
sequences packed in one row do not see each other, and a dense mask becomes a bias on the scores. Weights are never
stored, so output_attentions is refused. So are models that never call it: see `transformers_refusal`.

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

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import api, split
from rooftile.exact.masks import CAUSAL, FULL, Mask, Window
from rooftile.integrations import transformers_mask
from rooftile.integrations import transformers_refusal as refusal
from rooftile.integrations.transformers_lazy_mask import LazyMask, shape_of
from rooftile.integrations.transformers_packing import Packing, attend_packed, attend_with_bias, packing_of_mask, restarts

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

    refusal.check_models(NAME, PAGED)
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
    refusal.note_attention()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options = {"dropout": dropout, "scale": scaling, "sinks": s_aux, "softcap": softcap}
    call = _MaskArguments(is_causal, sliding_window, position_bias, position_ids, cu_seq_lens_q, cu_seq_lens_k)
    return _attend(module, q, k, v, attention_mask, call, options), None


class _MaskArguments(NamedTuple):
    """The arguments of a call that say what a query sees."""

    is_causal: bool | None
    sliding_window: int | None
    position_bias: Tensor | None  # (1|B, 1|H, T, S)
    position_ids: Tensor | None
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None


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


def _attend(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _MaskArguments, options: dict[str, Any]
) -> Tensor:  # fmt: skip
    """Returns o (B, T, H, Dv) under the mask, or under what the call says where the model made none."""
    if isinstance(mask, LazyMask):
        if shape_of(mask) != (q.shape[0], 1, q.shape[1], k.shape[1]):
            # keys that the mask was not made for: eager attention takes its first columns
            mask = mask[..., : k.shape[1]]
            return api.attention(q, k, v, bias=_added(mask, call.position_bias, q.dtype), **options)
        pattern, packing = mask.decision.pattern, packing_of_mask(mask)
    elif mask is not None:
        return api.attention(q, k, v, bias=_added(_checked(mask), call.position_bias, q.dtype), **options)
    else:
        pattern, packing = _pattern_without_mask(module, call, q.shape[1], k.shape[1]), None
        if call.cu_seq_lens_q is not None and call.cu_seq_lens_k is not None:
            packing = Packing(None, None, call.cu_seq_lens_q, call.cu_seq_lens_k)
    if packing is None and pattern.right == 0 and call.position_ids is not None and not split.active():
        packing = restarts(call.position_ids, q, k)
    if packing is None:
        return api.attention(q, k, v, pattern, bias=call.position_bias, **options)
    if call.position_bias is None:
        return attend_packed(q, k, v, pattern, packing, options)
    return attend_with_bias(q, k, v, pattern, packing, call.position_bias, options)


def _checked(mask: Tensor) -> Tensor:
    if mask.ndim != 4:
        raise InvalidInput(
            f"attention_mask is {mask.dtype} {tuple(mask.shape)}; must have 4 axes, (B, 1 or H, T, S); use "
            'attn_implementation="sdpa" for a model that makes its own'
        )
    return mask


def _pattern_without_mask(module: torch.nn.Module, call: _MaskArguments, T: int, S: int) -> Mask:
    """Returns what a model means that made no mask: as with "sdpa", causal if it or its module says so.

    Raises:
        Unsupported: there is a window or a chunk, and nothing says whether this layer has it or what it counts.
    """
    causal = call.is_causal if call.is_causal is not None else getattr(module, "is_causal", True)
    if call.sliding_window is not _NOT_PASSED:
        window = call.sliding_window
        if window and not causal and window < max(T, S):
            raise Unsupported(
                f"sliding_window={window} came without a mask to attention that is not causal, where it may count the query or "
                'not; use attn_implementation="sdpa"'
            )
        # Transformers counts the query itself
        return CAUSAL & Window(window - 1) if window and causal else CAUSAL if causal else FULL
    config = getattr(module, "config", None)
    for name in ("sliding_window", "attention_chunk_size") if causal else ():
        size = getattr(config, name, None)
        if size and size < S:
            raise Unsupported(
                f"config.{name} is {size}, and this model made no mask that says which layers have it; use "
                'attn_implementation="sdpa"'
            )
    return CAUSAL if causal else FULL


def _added(attention_mask: Tensor, position_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Combines a dense mask (1|B, 1|H, T, S), bool or additive, and the bias into one bias."""
    if attention_mask.dtype == torch.bool and position_bias is None:
        return attention_mask
    if attention_mask.dtype == torch.bool:
        return position_bias.masked_fill(~attention_mask, float("-inf"))
    return attention_mask if position_bias is None else attention_mask + position_bias
