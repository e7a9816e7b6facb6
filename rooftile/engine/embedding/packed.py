"""A decoder that reads packed texts without a cache, for their hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.engine.mixers.exact.masks import masks_of
from rooftile.errors import Unsupported
from rooftile.exact.api import attention_packed
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder
from rooftile.models.attention_layer import AttentionLayer


class PackedDecoder:
    """Runs a decoder on packed texts, each of which sees itself alone.

    Raises:
        Unsupported: a layer has something else than exact attention, or several ranks share the model.
    """

    def __init__(self, decoder: Decoder) -> None:
        others = sorted({mixer for mixer in decoder.config.mixers if mixer != "attention"})
        if others:
            raise Unsupported(
                f"the model has layers of {', '.join(others)}; texts are embedded by models whose layers all have exact attention"
            )
        if decoder.placement.ranks > 1:
            raise Unsupported("several ranks share the model; texts are embedded by one: leave tensor_parallel_size out")
        self.decoder = decoder
        self._masks = masks_of(decoder.config)

    def __call__(self, tokens: Tensor, cu: Tensor) -> Tensor:
        """Returns the hidden states (total, hidden) of texts that begin at cu (B + 1,)."""
        config, layers = self.decoder.config, self.decoder.layers
        starts = cu[:-1].repeat_interleave(cu.diff(), output_size=len(tokens))

        def attend(n: int, /, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, **named: Any) -> Tensor:
            if rotation is not None:
                q, k = rotate(q, rotation), rotate(k, rotation)
            layer = layers[n]
            sinks = layer.sinks if isinstance(layer, AttentionLayer) else None
            return attention_packed(
                q, k, v, cu, cu, self._masks[n], scale=config.scale, softcap=config.softcap, sinks=sinks
            )  # fmt: skip

        return self.decoder(tokens, torch.arange(len(tokens), device=tokens.device) - starts, attend)
