"""The masks of Transformers' models, in the forms that attn_implementation="rooftile" runs.

Transformers calls `mask` once per forward and pattern. It returns one of

    None                   the pattern (causal, window) defines the mask
    bool (B, S)            bidirectional: True for real keys
    int32 (B, S)           causal: the sequence of each key slot, from 1; 0 for padding, -1 for an unwritten slot of a
                           static cache. The queries belong to the last T written slots
    float (B, 1, T, S)     added to the scores, as Transformers' eager attention does

The last form costs memory and is always correct. It serves single queries with padding, patterns that the other forms
cannot express (image tokens that see each other, user-defined functions, chunks in a cache that has dropped keys), and
torch.compile, where nothing may depend on the padding. A pattern is recognised by the functions that Transformers
composes it from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rooftile.masks import CAUSAL, FULL, Chunk, Mask, Window


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,  # (B, all slots so far), bool
    **settings: Any,
) -> Tensor | None:
    """The mask function that Transformers calls, with the arguments of its own. The module's docstring lists its results."""
    from transformers.masking_utils import causal_mask_function, eager_mask

    mask_function = causal_mask_function if mask_function is None else mask_function

    def dense() -> Tensor:
        asked = settings | {"allow_is_bidirectional_skip": False}
        return eager_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **asked)

    recognised = _recognise(mask_function)
    if recognised is None or not isinstance(q_offset, int):
        return dense()
    pattern, packed = recognised
    causal = pattern.right == 0
    # the number of written key slots; a static cache has more, and then the last query is not at the last key
    written = q_offset + q_length - kv_offset if causal else kv_length
    if causal and not q_length <= written <= kv_length:
        return dense()
    if packed is not None and (pattern.chunks or packed.shape != (batch_size, kv_length)):
        return dense()
    # without a causal mask, only a window depends on the positions of the queries
    if not causal and pattern != FULL and (q_length, q_offset) != (kv_length, kv_offset):
        return dense()
    # chunks count from the first key, and `attention` takes their size from the layer's type
    if pattern.chunks and (kv_offset or not hasattr(settings.get("config"), "layer_types")):
        return dense()

    is_plain = written == kv_length and packed is None
    if attention_mask is None and is_plain:
        return None
    if torch.compiler.is_compiling():
        return dense()
    keys = torch.ones(batch_size, kv_length, dtype=torch.bool, device=settings.get("device"))
    if attention_mask is not None:
        spare = max(kv_offset + kv_length - attention_mask.shape[1], 0)
        keys = torch.nn.functional.pad(attention_mask, (0, spare))[:, kv_offset : kv_offset + kv_length]
        if is_plain and bool(keys.all()):
            return None
    # a single query reads every key once: adding to its scores is cheaper than gathering its keys
    if q_length == 1 or (pattern not in (FULL, CAUSAL) and _has_holes(keys[:, :written])):
        return dense()
    if not causal:
        return keys
    sequences = numbered(torch.zeros_like(keys, dtype=torch.int32) if packed is None else packed) * keys
    sequences[:, written:] = -1
    return sequences


def _recognise(mask_function: Callable[..., Any]) -> tuple[Mask, Tensor | None] | None:
    """Returns the pattern of a mask function, and (B, T) indices of packed sequences; None for an unknown function."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return CAUSAL, None
    if mask_function is masking_utils.bidirectional_mask_function:
        return FULL, None
    if torch.compiler.is_compiling() or mask_function.__module__ != masking_utils.__name__:
        return None
    inside = inspect.getclosurevars(mask_function).nonlocals
    match mask_function.__qualname__.split(".")[0]:
        case "and_masks":
            return _recognise_all(inside["mask_functions"])
        case "sliding_window_overlay":
            return Window(inside["sliding_window"] - 1), None
        case "sliding_window_bidirectional_overlay":
            return Window(inside["sliding_window"], inside["sliding_window"]), None
        case "chunked_overlay":
            return Chunk(inside["chunk_size"]), None
        case "packed_sequence_mask_function":
            return FULL, inside["packed_sequence_mask"]
    return None


def _recognise_all(parts: Iterable[Callable[..., Any]]) -> tuple[Mask, Tensor | None] | None:
    """Returns what several functions say together.

    Since Transformers 5.24 one of them counts positions within packed sequences. Inside of a sequence a pattern says the same of
    these, so it is a pattern only beside the sequences themselves.
    """
    pattern, packed = FULL, None
    parts = list(parts)
    inner = [_within_sequences(part) for part in parts]
    for part in map(_recognise, (part if within is None else within for part, within in zip(parts, inner, strict=True))):
        if part is None or (packed is not None and part[1] is not None):
            return None
        pattern, packed = pattern & part[0], packed if part[1] is None else part[1]
    return None if packed is None and any(inner) else (pattern, packed)


def _within_sequences(mask_function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that one of Transformers' asks with positions within packed sequences; None for another."""
    if mask_function.__qualname__.split(".")[0] != "remap_positions_for_packed_sequence":
        return None
    inside: Callable[..., Any] = inspect.getclosurevars(mask_function).nonlocals["mask_function"]
    return inside


def _has_holes(keys: Tensor) -> bool:
    """Whether padding is between tokens: removing it would change distances."""
    rises = (keys[:, 1:] & ~keys[:, :-1]).sum(1) + keys[:, 0]
    return bool((rises > 1).any())


def numbered(index: Tensor) -> Tensor:
    """Renumbers rising indices (B, T), which start at 0 in each row, to int32 that continues from row to row, from 1."""
    counts = index[:, -1] + 1
    return (index + (counts.cumsum(0) - counts)[:, None] + 1).to(torch.int32)
