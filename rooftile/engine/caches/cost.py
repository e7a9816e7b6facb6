"""The bytes and FLOPs of an engine's steps, by its model and caches."""

from __future__ import annotations

import math

from torch import Tensor

from rooftile.cost.decoder import DecoderCost
from rooftile.kvcache.caches import Caches
from rooftile.models import Decoder
from rooftile.models.experts.feed_forward import ExpertFeedForward
from rooftile.models.layers import Layer
from rooftile.models.projection import Projection
from rooftile.weights import QuantisedWeight


def cost_of(decoder: Decoder, caches: Caches) -> DecoderCost:
    """Returns the costs of a model and its caches."""
    config, pages, states = decoder.config, caches.pages, caches.states
    nbytes, numbers = weight_bytes(decoder)
    routed = [weight for layer in decoder.layers for weight in routed_weights(layer)]
    share = 0.0 if config.experts is None else config.experts.router.active / config.experts.experts
    idle = (1 - share) * sum(math.prod(weight.shape) for weight in routed)
    expert_bytes = sum(weight.nbytes for weight in routed)
    # the embedding is looked up; the head, which may be the same table, is multiplied
    looked_up = 0 if config.tie else decoder.embedding.nbytes
    return DecoderCost(
        weight_bytes=nbytes - looked_up - expert_bytes,
        token_bytes=pages.nbytes // (pages.storage.shape[0] * pages.storage.shape[3]),
        token_flops=round(2 * (numbers - idle)),
        state_bytes=0 if states is None else sum(x[:, :1].nbytes for x in states.memory.values()),
        expert_bytes=expert_bytes,
        expert_share=share,
    )


def weight_bytes(decoder: Decoder) -> tuple[int, int]:
    """Returns the bytes of all weights, and how many numbers the layers' weights hold; quantised ones with their scales."""
    parts = [part for module in decoder.modules() if isinstance(module, Projection) for part in module.parts]
    plain = sum(x.nbytes for x in decoder.parameters())
    numbers = sum(x.numel() for layer in decoder.layers for x in layer.parameters())
    return plain + sum(part.nbytes for part in parts), numbers + sum(math.prod(part.shape) for part in parts)


def routed_weights(layer: Layer) -> list[Tensor | QuantisedWeight]:
    """Returns the weights of a layer's experts, of which a token reads some; none if it has no experts."""
    experts = layer.feed_forward
    if not isinstance(experts, ExpertFeedForward):
        return []
    return [x for x in (experts.up, experts.down, experts.up_bias, experts.down_bias) if x is not None]
