"""Mixes the tokens of any kind of layer by its definition, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

import rooftile
from rooftile.fused.rope import rotate
from rooftile.models import Decoder
from tests.models import latent, recurrent, sparse


def mixed(decoder: Decoder, lengths: Sequence[int]) -> Any:
    """Returns what mixes the tokens of sequences that lie back to back."""
    cu, config = [0, *accumulate(lengths)], decoder.config
    by_recurrence, by_latents = recurrent.mixed(decoder, lengths), latent.mixed(decoder, lengths)

    def attend(layer: int, *given: Any) -> Tensor:
        match config.mixers[layer]:
            case "latent":
                return by_latents(layer, *given)
            case "native_sparse":
                rows = [tuple(None if x is None else _rows(x, *ends) for x in given) for ends in pairwise(cu)]
                by_branches = sparse.attention_without_cache(decoder, backend="eager")
                return torch.cat([by_branches(layer, *part) for part in rows])
            case "attention":
                return _attention(decoder, layer, torch.tensor(cu), *given)
            case _:
                return by_recurrence(layer, *given)

    return attend


def _rows(x: Any, begin: int, end: int) -> Any:
    return x[begin:end] if isinstance(x, Tensor) else type(x)(*(part[begin:end] for part in x))


def _attention(decoder: Decoder, layer: int, cu: Tensor, q: Tensor, k: Tensor, v: Tensor, rotation: Any) -> Tensor:
    config = decoder.config
    q, k = (x if rotation is None else rotate(x, rotation) for x in (q, k))
    window = config.windows[layer]
    mask = rooftile.CAUSAL if window is None else rooftile.CAUSAL & rooftile.Window(window - 1)
    options = {"scale": config.scale, "softcap": config.softcap, "sinks": decoder.layers[layer].sinks}
    return rooftile.attention_packed(q, k, v, cu, cu, mask, **options)
