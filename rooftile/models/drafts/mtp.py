"""`MtpHead`: the layer of multi-token prediction that a checkpoint has behind its last layer.

    u_i     = M [norm(e(t_{i+1})); norm(f_i)]     f_i: the decoder's hidden state at position i
    g_i     = norm(layer(u)_i)                    over the pairs so far
    logits  = H g_i                               for t_{i+2}, with the decoder's embedding e and head H

Further tokens are guessed with g_i in the place of f_{i+1}, which the decoder has not computed yet. DeepSeek-V3 and GLM-4.5 read
hidden states behind the decoder's last norm. MiMo reads them before it, and has the halves of M the other way round.

DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 2.2; Xiaomi, MiMo, arXiv:2505.07608.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from rooftile.fused.norm import normalise
from rooftile.fused.one_row import project
from rooftile.models.checkpoints.places import tensors_of_layer
from rooftile.models.config import ModelConfig
from rooftile.models.decoder import Decoder
from rooftile.models.drafts.head import DraftHead
from rooftile.models.layer_kinds import layer_of
from rooftile.models.layers import Attend
from rooftile.models.placement import Placement
from rooftile.models.projection import Multiply, Norm, Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """A family's names for the parts that an MTP layer has and a usual layer lacks; the defaults are DeepSeek-V3's names.

    Args:
        token_norm, hidden_norm, norm: the norms of the embedding, of the hidden state, and in front of the head.
        join: the projection that joins the first two.
        shared: tensors that repeat the decoder's own.
        hidden_first: whether `join` has the columns of the hidden state first, and then the embedding's.
        before_norm: whether the hidden states are those before the decoder's last norm.
    """

    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    norm: str = "shared_head.norm"
    join: str = "eh_proj"
    shared: tuple[str, ...] = ("shared_head.head.weight", "embed_tokens.weight")
    hidden_first: bool = False
    before_norm: bool = False


class MtpHead(DraftHead):
    """Such a layer with uninitialised weights, except for the decoder's embedding and head, which it shares.

    Args:
        config: its layer, as a model of one layer.
        decoder: the decoder that it drafts for.
        names: says how it joins its inputs.
    """

    def __init__(self, config: ModelConfig, decoder: Decoder, names: MtpNames) -> None:
        placement = Placement(decoder.embedding.dtype, decoder.embedding.device)
        norm, token_norm, hidden_norm = (Norm(config, config.hidden, placement=placement) for _ in range(3))
        taps = (decoder.config.layers,) if names.before_norm else ()
        super().__init__(config, decoder.embedding, layer_of(config, 0, placement), norm, taps=taps)
        self.names, self.token_norm, self.hidden_norm = names, token_norm, hidden_norm
        self.join = Projection(config.hidden, 2 * config.hidden, bias=False, placement=placement)
        self.head = decoder.head

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights with their names behind the layer's."""
        yield from tensors_of_layer(self.layers[0], self.config)
        names = self.names
        norms = ((names.token_norm, self.token_norm), (names.hidden_norm, self.hidden_norm), (names.norm, self.norm))
        yield from ((f"{name}.weight", norm.weight) for name, norm in norms)
        assert self.join.weight is not None
        yield f"{names.join}.weight", self.join.weight

    def forward(
        self, tokens: Tensor, positions: Tensor, features: Tensor, attend: Attend, multiply: Multiply = linear
    ) -> tuple[Tensor, Tensor]:
        mixer_norm = self.layers[0].mixer_norm
        assert mixer_norm is not None
        parts = [normalise(self.embedding.index_select(0, tokens), self.token_norm), normalise(features, self.hidden_norm)]
        stream = self.join(torch.cat(parts[::-1] if self.names.hidden_first else parts, dim=1), multiply)
        hidden, _ = self._through_layer(normalise(stream, mixer_norm), stream, positions, attend, multiply)
        return hidden, hidden

    def logits(self, hidden: Tensor, multiply: Multiply = linear) -> Tensor:
        return (project if multiply is linear else multiply)(hidden, self.head, None)
