"""`Eagle3Head`: one layer that guesses the token after the next one, from a decoder's hidden states and the next token.

    f_i     = F [s_i(a); s_i(b); s_i(c)]          the streams that reach three layers of the decoder, at position i
    u       = [norm(e(t_{i+1})); norm(f_i)]       beside each other: twice the width
    g       = f_i + attention(u)                  over the pairs so far, at position i
    g_i     = g + feed_forward(norm(g))
    logits  = H norm(g_i)                         over some of the decoder's tokens, for t_{i+2}

Further tokens are guessed with g_i in the place of f_{i+1}, which the decoder has not computed yet.

Li, Wei, Zhang, Zhang, EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from rooftile.fused.norm import normalise
from rooftile.models.attention_layer import AttentionLayer
from rooftile.models.config import ModelConfig
from rooftile.models.drafts.head import DraftHead
from rooftile.models.layers import Attend
from rooftile.models.placement import Placement
from rooftile.models.projection import Multiply, Norm, Projection

# the streams of as many layers
TAPS = 3


class Eagle3Head(DraftHead):
    """A head with uninitialised weights, except for the decoder's embedding, which it shares.

    Args:
        config: its layer; `vocab_size` is the decoder's.
        drafted: how many tokens it can guess.
        embedding: the decoder's embedding, (vocab_size, hidden).
        taps: the three layers of the decoder whose streams it reads.
    """

    fuse: Tensor

    def __init__(self, config: ModelConfig, drafted: int, embedding: Tensor, taps: tuple[int, ...]) -> None:
        placement = Placement(embedding.dtype, embedding.device)
        layer = AttentionLayer(config, 0, placement)
        layer.qkv = Projection(layer.qkv.outputs, 2 * config.hidden, bias=config.qkv_bias, placement=placement)
        norm, fuse = Norm(config, config.hidden, placement=placement), placement.parameter(config.hidden, TAPS * config.hidden)
        super().__init__(config, embedding, layer, norm, taps=taps, fuse=fuse)
        self.hidden_norm = Norm(config, config.hidden, placement=placement)
        self.head = placement.parameter(drafted, config.hidden)
        self.tokens = torch.zeros(drafted, dtype=torch.int64, device=embedding.device)
        """The decoder's token of each row of the head."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights with their names in a folder."""
        layer = cast("AttentionLayer", self.layers[0])
        norms = (
            ("input_layernorm", layer.mixer_norm),
            ("hidden_norm", self.hidden_norm),
            ("post_attention_layernorm", layer.ffn_norm),
        )
        yield "fc.weight", self.fuse
        for name, norm in norms:
            assert norm is not None
            yield f"midlayer.{name}.weight", norm.weight
        config, feed_forward = self.config, layer.feed_forward
        assert feed_forward is not None
        keys = config.kv_heads * config.head_dim
        rows = {"q": config.heads * config.head_dim, "k": keys, "v": keys}
        for suffix in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = getattr(layer.qkv, suffix).split([*rows.values()])
            yield from ((f"midlayer.self_attn.{name}_proj.{suffix}", part) for name, part in zip(rows, parts, strict=True))
        up, down = feed_forward.projections
        assert layer.o.weight is not None
        assert up.weight is not None
        assert down.weight is not None
        yield "midlayer.self_attn.o_proj.weight", layer.o.weight
        yield from zip(("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"), up.weight.chunk(2), strict=True)
        yield "midlayer.mlp.down_proj.weight", down.weight
        yield "norm.weight", self.norm.weight
        yield "lm_head.weight", self.head

    def forward(
        self, tokens: Tensor, positions: Tensor, features: Tensor, attend: Attend, multiply: Multiply = linear
    ) -> tuple[Tensor, Tensor]:
        mixer_norm = self.layers[0].mixer_norm
        assert mixer_norm is not None
        embedded = self.embedding.index_select(0, tokens)
        both = torch.cat((normalise(embedded, mixer_norm), normalise(features, self.hidden_norm)), dim=1)
        return self._through_layer(both, features, positions, attend, multiply)

    def logits(self, hidden: Tensor, multiply: Multiply = linear) -> Tensor:
        scores = multiply(hidden, self.head, None)
        whole = scores.new_full((len(scores), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.tokens, scores)
