"""`DraftHead`: a layer that guesses tokens for a decoder, from the decoder's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor, nn
from torch.nn.functional import linear

from rooftile.fused.norm import add_norm
from rooftile.models.config import ModelConfig
from rooftile.models.decoder import Decoder, rotation_at
from rooftile.models.layers import Attend, Layer
from rooftile.models.projection import Multiply, Norm


class DraftHead(nn.Module):
    """One layer behind a decoder, with uninitialised weights.

    A row of its input is a pair: the features of position i, which the decoder has computed, and token i + 1. From it the head
    guesses token i + 2.

    Args:
        config: its layer; `vocab_size` and `max_len` are the decoder's.
        embedding: the decoder's embedding, (vocab_size, hidden), which it shares.
        layer: the layer.
        norm: the norm in front of its logits.
        taps: the layers of the decoder whose streams it reads, as they reach the layer; the number of layers stands for the
            stream behind the last one. None at all for the hidden states after the last norm.
        fuse: joins the streams of several layers to its features, (hidden, layers x hidden); None for one stream.
    """

    rotary: Tensor | None

    def __init__(
        self, config: ModelConfig, embedding: Tensor, layer: Layer, norm: Norm, *, taps: tuple[int, ...],
        fuse: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config, self.embedding, self.norm = config, embedding, norm
        # a ModuleList is a sequence of its modules, but torch's types do not say so
        self.layers = cast("Sequence[Layer]", nn.ModuleList([layer]))
        self.taps, self.fuse = taps, fuse
        rotary, dtype = config.rotary, embedding.dtype
        table = None if rotary is None else rotary.table(config.max_len, dtype=dtype, device=embedding.device)
        self.register_buffer("rotary", table, persistent=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, features: Tensor, attend: Attend, multiply: Multiply = linear
    ) -> tuple[Tensor, Tensor]:
        """Returns what logits are made of, and what takes the place of the next features, (total, hidden) each.

        Args:
            tokens: the decoder's tokens, each of the position behind its features', (total,) int64.
            positions: the positions of the features, (total,) int64.
            features: the decoder's, or this head's own, (total, hidden); they are overwritten.
            attend: mixes the tokens of its layer.
            multiply: computes the linear projections.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, multiply: Multiply = linear) -> Tensor:
        """Returns logits (n, vocab_size) of hidden states (n, hidden): -inf for tokens that it cannot guess."""
        raise NotImplementedError

    def _through_layer(
        self, x: Tensor, stream: Tensor, positions: Tensor, attend: Attend, multiply: Multiply
    ) -> tuple[Tensor, Tensor]:
        """Adds to a stream what the layer makes of the normalised x; returns it after the norm, and before."""
        layer = self.layers[0]
        assert layer.ffn_norm is not None
        assert layer.feed_forward is not None
        x = layer.mix(0, x, rotation_at(self.rotary, positions), attend, multiply)
        x, stream = add_norm(x, stream, layer.ffn_norm)
        return add_norm(layer.feed_forward(x, multiply), stream, self.norm)


class HeadPlan(Protocol):
    """A head that is checked against its decoder, before weights are read."""

    @property
    def config(self) -> ModelConfig:
        """The configuration of its layer."""

    def read(self, decoder: Decoder) -> DraftHead:
        """Reads the weights of the head for a decoder, whose dtype and device it takes.

        Raises:
            InvalidInput: tensors are missing, or have other shapes.
        """
