"""Runs a decoder for a plan: texts, prompts, and decode steps whose keys and values are random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rooftile.engine.mixers.exact.masks import masks_of
from rooftile.errors import InvalidInput
from rooftile.exact.api import attention, attention_packed
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder
from rooftile.models.layers import Attend

# hidden states whose logits are made at once
AT_ONCE = 1024


def hidden_of(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Returns the hidden states of a text."""
    positions = torch.arange(len(tokens), device=tokens.device)
    with torch.no_grad():
        return decoder(tokens, positions, _causal(decoder, [len(tokens)]))


def loss_of(decoder: Decoder, text: Tensor) -> float:
    """Returns the sum of the losses of a text's tokens after the first, in nats.

    Raises:
        InvalidInput: the text is too long.
    """
    total, most = 0.0, decoder.config.max_len
    if len(text) > most:
        raise InvalidInput(f"data has a text of {len(text)} tokens, and the model {most} positions; cut it into pieces")
    hidden, targets = hidden_of(decoder, text[:-1]), text[1:]
    with torch.no_grad():
        for part, due in zip(hidden.split(AT_ONCE), targets.split(AT_ONCE), strict=True):
            total += cross_entropy(decoder.logits(part).float(), due, reduction="sum").item()
    return total


def reading(decoder: Decoder, lengths: Sequence[int]) -> Callable[[], Any]:
    """Returns what reads prompts of some lengths at once, up to the logits of their last tokens."""
    device = decoder.embedding.device
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    tokens, last = torch.zeros_like(positions), torch.tensor(lengths).cumsum(0).to(device) - 1
    attend = _causal(decoder, lengths)

    def run() -> Tensor:
        with torch.no_grad():
            return decoder.logits(decoder(tokens, positions, attend)[last])

    return run


def decoding(decoder: Decoder, rows: int, context: int) -> Callable[[], Any]:
    """Returns what decodes one token of each of `rows` sequences of `context` tokens."""
    config, device = decoder.config, decoder.embedding.device
    positions = torch.full((rows,), context - 1, device=device)
    tokens = torch.zeros_like(positions)
    shape = (rows, context, config.kv_heads, config.head_dim)
    keys, values = (torch.randn(shape, device=device).to(decoder.embedding.dtype) for _ in range(2))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
        q, k = (x if rotation is None else rotate(x, rotation) for x in (q, k))
        seen = min(config.windows[layer] or context, context)
        o = attention(q[:, None], keys[:, -seen:], values[:, -seen:], scale=config.scale, softcap=config.softcap)
        return o[:, 0]

    def run() -> Tensor:
        with torch.no_grad():
            return decoder.logits(decoder(tokens, positions, attend))

    return run


def _causal(decoder: Decoder, lengths: Sequence[int]) -> Attend:
    """Attention within packed sequences."""
    config, masks = decoder.config, masks_of(decoder.config)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
        q, k = (x if rotation is None else rotate(x, rotation) for x in (q, k))
        return attention_packed(q, k, v, cu, cu, masks[layer], scale=config.scale, softcap=config.softcap)

    return attend
