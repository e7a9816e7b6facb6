"""The masks of Transformers' models, as attn_implementation="rooftile" makes them.

Transformers calls `mask` once per forward and pattern, with a function that says which key a query sees. `mask` recognises the
functions that Transformers composes and returns a `LazyMask`: a tensor (B, 1, T, S) that carries the pattern and the padding to
`transformers.attention`, which decides nothing itself. A model that computes with the mask gets the numbers of eager attention.

It returns those numbers at once, as a plain tensor (B, 1, T, S), for single queries with padding, for functions that it does
not recognise (image tokens that see each other, functions of users, chunks in a cache that has dropped keys), and in
torch.compile with padding, where nothing may depend on values. That costs memory and is always correct.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact import split
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Window
from rooftile.integrations.transformers_lazy_mask import Decision, lazy
from rooftile.integrations.transformers_refusal import note_a_mask


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,  # (B, all slots so far), bool
    **settings: Any,
) -> Tensor:
    """The mask function that Transformers calls, with the arguments of its own. Returns a LazyMask or a dense mask."""
    from transformers.masking_utils import causal_mask_function, eager_mask

    note_a_mask(settings.get("config"))
    mask_function = causal_mask_function if mask_function is None else mask_function

    def dense() -> Tensor:
        asked = settings | {"allow_is_bidirectional_skip": False}
        return eager_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **asked)

    pattern_and_packed = _pattern(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function)
    if pattern_and_packed is None:
        return dense()
    pattern, packed = pattern_and_packed
    sequences = None
    if split.active():
        # the positions of a rank's tokens jump where the layout does; documents are the context's to say
        if attention_mask is not None and not bool(attention_mask.all()):
            raise Unsupported("attention_mask with padding inside rooftile.parallel.context; has none: pack the sequences (cu=)")
        return lazy(
            Decision(pattern, None, False, dense), (batch_size, 1, q_length, kv_length), settings.get("dtype", torch.float32),
            settings.get("device", "cpu"),
        )  # fmt: skip
    written = q_offset + q_length - kv_offset if pattern.right == 0 else kv_length  # type: ignore[operator]
    if attention_mask is not None or packed is not None or written != kv_length:
        if not _has_values(settings.get("device")):
            return dense()
        keys = _real_keys(batch_size, kv_length, kv_offset, attention_mask, settings.get("device"))
        if packed is not None or written != kv_length or not bool(keys.all()):
            # a single query reads every key once: adding to its scores is cheaper than gathering its keys
            if q_length == 1 or (pattern not in (FULL, CAUSAL) and _has_holes(keys[:, :written])):
                return dense()
            sequences = numbered(torch.zeros_like(keys, dtype=torch.int32) if packed is None else packed) * keys
            sequences[:, written:] = -1
    # padded queries of an encoder are computed, as in eager attention: pooling and convolutions read them
    of_keys_only = pattern == FULL and packed is None
    decision = Decision(pattern, sequences, of_keys_only, dense)
    shape = batch_size, 1, q_length, kv_length
    return lazy(decision, shape, settings.get("dtype", torch.float32), settings.get("device", "cpu"))


def _pattern(
    B: int, T: int, S: int, q_offset: int | Tensor, kv_offset: int, mask_function: Callable[..., Any]
) -> tuple[Mask, Tensor | None] | None:  # fmt: skip
    """Returns the pattern that the function means for these lengths, and (B, S) indices of packed sequences; None if in doubt."""
    recognised = _recognise(mask_function)
    if recognised is None or not isinstance(q_offset, int):
        return None
    pattern, packed = recognised
    causal = pattern.right == 0
    # a static cache has more slots than are written, and then the last query is not at the last key
    if causal and not T <= q_offset + T - kv_offset <= S:
        return None
    # without a causal mask, only a window depends on the positions of the queries
    if not causal and pattern != FULL and (T, q_offset) != (S, kv_offset):
        return None
    if packed is not None and (pattern.chunks or packed.shape != (B, S)):
        return None
    # chunks count from the first key
    if pattern.chunks and kv_offset:
        return None
    return pattern, packed


def _has_values(device: Any) -> bool:
    """Whether tensors have values to read: not in torch.compile, in an export or on meta."""
    if torch.compiler.is_compiling():
        return False
    number = torch.empty((), device=device)
    return type(number) is Tensor and not number.is_meta


def _real_keys(B: int, S: int, kv_offset: int, attention_mask: Tensor | None, device: Any) -> Tensor:
    """Returns True (B, S) for the key slots that are no padding."""
    if attention_mask is None:
        return torch.ones(B, S, dtype=torch.bool, device=device)
    spare = max(kv_offset + S - attention_mask.shape[1], 0)
    keys = torch.nn.functional.pad(attention_mask, (0, spare))[:, kv_offset : kv_offset + S]
    return keys.expand(B, S)


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
        # a window of 0 hides every key, which no Window says
        case "sliding_window_overlay" if inside["sliding_window"] > 0:
            return Window(inside["sliding_window"] - 1), None
        case "sliding_window_bidirectional_overlay":
            return Window(inside["sliding_window"], inside["sliding_window"]), None
        case "chunked_overlay":
            return Chunk(inside["chunk_size"]), None
        case "packed_sequence_mask_function":
            return FULL, inside["packed_sequence_mask"]
    return None


def _recognise_all(parts: Iterable[Callable[..., Any]]) -> tuple[Mask, Tensor | None] | None:
    pattern, packed, remapped = FULL, None, False
    for part in parts:
        # from 5.24 on: positions within each packed sequence, which differ by as much as places in the row do
        if part.__qualname__.startswith("remap_positions_for_packed_sequence."):
            part, remapped = inspect.getclosurevars(part).nonlocals["mask_function"], True
        recognised = _recognise(part)
        if recognised is None or (packed is not None and recognised[1] is not None):
            return None
        pattern, packed = pattern & recognised[0], packed if recognised[1] is None else recognised[1]
    return None if remapped and packed is None else (pattern, packed)


def _has_holes(keys: Tensor) -> bool:
    """Whether padding is between tokens: removing it would change distances."""
    rises = (keys[:, 1:] & ~keys[:, :-1]).sum(1) + keys[:, 0]
    return bool((rises > 1).any())


def numbered(index: Tensor) -> Tensor:
    """Renumbers rising indices (B, T), which start at 0 in each row, to int32 that continues from row to row, from 1."""
    counts = index[:, -1] + 1
    return (index + (counts.cumsum(0) - counts)[:, None] + 1).to(torch.int32)
