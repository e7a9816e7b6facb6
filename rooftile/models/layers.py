"""A layer: what mixes tokens, and a feed-forward or nothing."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile.fused.rope import Rotation
from rooftile.models.config import ModelConfig
from rooftile.models.experts.feed_forward import ExpertFeedForward
from rooftile.models.feed_forward import DenseFeedForward, FeedForward
from rooftile.models.placement import Placement
from rooftile.models.projection import InputFormat, Multiply, Norm, Projection
from rooftile.numerics import QuantisedRows


class Attend(Protocol):
    """Mixes the tokens of a layer; the caller brings it, and decides which tokens see which and where they are kept.

    A layer gives what its kind gives (`ModelConfig.mixers`), and takes one row of `Layer.o.inputs` numbers a token, in any shape:

        "attention"      q (total, H, D), k and v (total, Hk, D), rotation
        "linear", "performer"  the same
        "native_sparse"  the same, and gates (total, H, 3)
        "mamba"          x, before the convolution (total, W)
        "mamba2"         x, B and C side by side, before the convolution (total, W + 2 G N), and time steps (total, H)
        "delta"          q, k and v side by side, before the convolution (total, 2 Hk Dk + Hv Dv), and the logits of beta and of
                         the decays (total, Hv) each
        "latent"         q that does not rotate (total, H, unrotated) and q that does (total, H, rotated), the latent
                         (total, rank) and the key that rotates (total, rotated); both are rotated already

    Sinks of heads with attention are in `AttentionLayer.sinks`, None where the family has none.

    Queries and keys are normalised but not yet rotated (see `rooftile.kvcache.rotate`), so that keys can be rotated while they
    are written into a cache; the rotation is (total, D / 2) each, or None where queries and keys do not rotate. All tensors are
    views with gaps between their tokens. Scale, softcap and windows are in the decoder's configuration: config.scale,
    config.softcap, config.windows[layer].

    A layer with "native_sparse" has three times as many heads of keys and values: the heads of the compressed, the selected and
    the near branch, one branch after the other. `AttentionLayer.compression` maps blocks of the first. What a recurrence is made
    of, such as the weights of its convolution, is in `MambaLayer`, `Mamba2Layer` and `DeltaLayer`; `PerformerLayer` has the
    features, and `LatentLayer` the maps of a latent to keys and values.
    """

    def __call__(self, layer: int, /, *given: Any, **named: Any) -> Tensor:
        """Mixes the tokens of one layer."""
        ...


class Layer(nn.Module):
    """One layer: what mixes tokens, for which each kind of layer has a class of its own, and a feed-forward or nothing.

    Args:
        config: the whole model.
        n: the number of the layer.
        placement: where its tensors are, and which part of them.
        waits: whether its projections get their weights later.
    """

    o: Projection
    """The projection that reads what the caller has mixed."""
    feed_forward: FeedForward | None
    """The feed-forward that follows, or None."""
    config: ModelConfig
    """The part of the model that this rank holds."""

    def __init__(self, config: ModelConfig, n: int, placement: Placement, *, waits: bool = False) -> None:
        super().__init__()
        self.placement, self.config = placement, placement.part(config)
        self.feed_forward = _feed_forward_of(config, n, placement, waits=waits)

        def norm(exists: bool) -> Norm | None:
            return Norm(config, config.hidden, placement=placement) if exists else None

        pre, post = config.norms_of(n)
        self.mixer_norm, self.mixer_post_norm = norm(pre), norm(post)
        follows = self.feed_forward is not None
        self.ffn_norm, self.ffn_post_norm = norm(follows and pre), norm(follows and post)

    @property
    def reader(self) -> Projection:
        """The projection that reads the normalised stream, for what mixes tokens."""
        raise NotImplementedError

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections that a checkpoint may have quantised."""
        return self.reader, self.o, *(() if self.feed_forward is None else self.feed_forward.projections)

    def draw(self, generator: torch.Generator) -> None:
        """Draws the weights that random numbers near 0 would be no example of."""

    def rows_of_mixer(self, x: Tensor) -> InputFormat:
        """Returns how `mix` wants its input, computed from x."""
        return self.reader.rows(x)

    def mix(
        self, n: int, x: Tensor | QuantisedRows, rotation: Rotation | None, attend: Attend, multiply: Multiply = functional.linear
    ) -> Tensor:
        """Returns what mixing tokens in layer n adds to the residual stream, before its post norm; x is normalised."""
        raise NotImplementedError

    def _output(self, mixed: Tensor, multiply: Multiply) -> Tensor:
        """Returns what the layer adds to the stream: what was mixed, projected, summed over the ranks, and scaled."""
        x, scale = self.placement.summed(self.o(mixed, multiply)), self.config.residual_scale
        return x if scale is None else x * scale


def _feed_forward_of(config: ModelConfig, n: int, placement: Placement, *, waits: bool) -> FeedForward | None:
    match config.feed_forwards[n]:
        case "dense":
            return DenseFeedForward(config, placement, waits=waits)
        case "experts":
            return ExpertFeedForward(config, placement, waits=waits)
        case _:
            return None


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Applies a softcap, cap tanh(x / cap), which keeps scores within (-cap, cap); None leaves them as they are."""
    return x if cap is None else cap * torch.tanh(x / cap)
