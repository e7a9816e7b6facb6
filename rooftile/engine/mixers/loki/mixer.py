"""Loki in an engine: cached keys are turned by each layer's rotation, and single tokens read only the pages that they choose.

Queries are turned like the keys, so prompts, whose attention is exact, have the products that they had. A layer with a window
stays exact and its keys are not turned: there is little to leave out.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rooftile.approximate import LokiLayers
from rooftile.approximate.loki import decoding as paged
from rooftile.engine.mixers.exact.mixer import ExactMixer
from rooftile.engine.mixers.exact.step import ExactStep
from rooftile.engine.mixers.loki.calibration import sample_of
from rooftile.engine.mixers.mixer import Largest
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.settings.config import EngineConfig
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import CallSettings
from rooftile.fused.rope import rotate
from rooftile.kvcache import Rotation
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.operators import write
from rooftile.kvcache.specs import CacheSpec, Plane
from rooftile.models import Attend, Decoder, ModelConfig

# the plane of the leading dims of turned keys
LEADING = "leading dims"


class LokiMixer(ExactMixer):
    """Layers with attention, of which answers read only a share of the keys; prompts read all of them."""

    # tokens of a prompt read all keys, and tokens of an answer read the pages that they choose
    separates_prompts: ClassVar[bool] = True

    def __init__(self, shape: ModelConfig, layers: tuple[int, ...], config: EngineConfig) -> None:
        super().__init__(shape, layers, config)
        if shape.sinks:
            raise Unsupported(
                "approximate is given and the model has attention sinks, which Loki leaves out; leave approximate out"
            )
        given = config.approximate
        assert given is not None
        self.fitted = given if isinstance(given, LokiLayers) else LokiLayers.load(given)
        self.fitted.check_sizes(shape.layers, shape.kv_heads, shape.head_dim)
        if config.num_blocks is not None and config.num_blocks > self.most_blocks:
            raise InvalidInput(f"num_blocks is {config.num_blocks:,}; may be at most {self.most_blocks:,} with approximate=")

    @property
    def most_blocks(self) -> int:
        # a table numbers each row of each block, in 32 bits
        return (1 << 31) // (len(self.layers) * 2 * self.config.block_size * self.shape.kv_heads)

    def specs(self) -> tuple[CacheSpec, ...]:
        shape = len(self.layers), self.config.block_size, self.shape.kv_heads, self.fitted.leading
        return (*super().specs(), Plane(self.layers, LEADING, shape))

    def check_decoder(self, decoder: Decoder) -> None:
        self.fitted.check_sample(sample_of(decoder))

    def working_bytes(self, largest: Largest) -> int:
        # the scores of pages are sums, shares and sorted places: about six numbers of four bytes per head and page
        pages = -(-largest.length // self.config.block_size)
        return super().working_bytes(largest) + 24 * largest.answers * self.shape.heads * pages

    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        super().begin(decoder, caches, settings)
        self.rotations = {n: self.fitted.layers[n].p.to(caches.pages.storage.device) for n in self.layers}
        plane = caches.pages.planes[LEADING]  # (blocks, layers, size, Hk, r)
        self.leading = {n: plane[:, place] for place, n in enumerate(self.layers)}

    def on(self, step: StepTokens) -> Attend:
        return LokiStep(self, step)


class LokiStep(ExactStep):
    """Loki in one step."""

    def __init__(self, whole: LokiMixer, step: StepTokens) -> None:
        super().__init__(whole.caches, whole.masks, whole.settings, step)
        self.whole = whole

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        if self.masks[layer] != CAUSAL:
            return super().write(layer, q, k, v, rotation)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        p, plane = self.whole.rotations[layer], self.whole.leading[layer]
        q, k = turned(q, p), turned(k, p)
        self.pages.write(self.places[layer], k, v, self.step.cells)
        # the operator writes pairs: here both are the leading dims
        first = k[..., : self.whole.fitted.leading]
        write(first, first, plane, plane, self.step.cells, None)
        return q

    def decode(self, layer: int, q: Tensor) -> Tensor:
        if self.masks[layer] != CAUSAL:
            return super().decode(layer, q)
        assert self.step.single is not None
        cache = self.pages.view(self.places[layer], *self.step.narrow(*self.step.single))
        return paged.decode(q, cache, self.whole.leading[layer], keep=self.whole.fitted.keep, settings=self.settings)


def turned(x: Tensor, p: Tensor) -> Tensor:
    """Returns x P of queries or keys (total, heads, D), P (Hk, D, D) fp32; heads of a group share a rotation."""
    wide = x.to(torch.promote_types(x.dtype, p.dtype)).unflatten(1, (p.shape[0], -1))
    return torch.einsum("nhgd,hde->nhge", wide, p.to(wide.dtype)).flatten(1, 2).to(x.dtype)
