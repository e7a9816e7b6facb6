"""Loki in an engine: cached keys are turned by each layer's rotation, and single tokens read only the pages that they choose.

Queries are turned like the keys, so prompts, whose attention is exact, have the products that they had. A layer with a window
stays exact and its keys are not turned: there is little to leave out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.approximate import LokiLayers
from rooftile.approximate.loki import decoding as paged
from rooftile.engine.attention.exact import Exact
from rooftile.engine.attention.layout import LEADING
from rooftile.engine.attention.step import Step
from rooftile.exact.masks import CAUSAL, Mask
from rooftile.exact.spec import Asked
from rooftile.fused.rope import rotate
from rooftile.kvcache import Pages, Rotation
from rooftile.kvcache.operators import write


class LokiAttention:
    """The rotations of all layers on the device of a cache, whose plane LEADING has the leading dims of the keys."""

    def __init__(self, loki: LokiLayers, pages: Pages, asked: Asked) -> None:
        self.keep, self.r = loki.keep, loki.leading
        self.pages, self.asked = pages, asked
        self.rotations = [one.p.to(pages.storage.device) for one in loki.layers]

    def on(self, step: Step, masks: tuple[Mask, ...]) -> Exact:
        """Returns what computes attention in one step."""
        return _LokiStep(self, masks, step)


class _LokiStep(Exact):
    def __init__(self, loki: LokiAttention, masks: tuple[Mask, ...], step: Step) -> None:
        super().__init__(loki.pages, masks, loki.asked, step)
        self.loki = loki
        self.leading = loki.pages.planes[LEADING]  # (blocks, layers, size, Hk, r)

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        if self.masks[layer] != CAUSAL:
            return super().write(layer, q, k, v, rotation)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        p = self.loki.rotations[layer]
        q, k = turned(q, p), turned(k, p)
        self.pages.write(layer, k, v, self.step.cells)
        # the operator writes pairs: here both are the leading dims
        plane, first = self.leading[:, layer], k[..., : self.loki.r]
        write(first, first, plane, plane, self.step.cells, None)
        return q

    def decode(self, layer: int, q: Tensor) -> Tensor:
        if self.masks[layer] != CAUSAL:
            return super().decode(layer, q)
        assert self.step.single is not None
        cache = self.pages.view(layer, *self.step.narrow(*self.step.single))
        return paged.decode(q, cache, self.leading[:, layer], keep=self.loki.keep, asked=self.asked)


def turned(x: Tensor, p: Tensor) -> Tensor:
    """Returns x P of queries or keys (total, heads, D), P (Hk, D, D) fp32; heads of a group share a rotation."""
    wide = x.to(torch.promote_types(x.dtype, p.dtype)).unflatten(1, (p.shape[0], -1))
    return torch.einsum("nhgd,hde->nhge", wide, p.to(wide.dtype)).flatten(1, 2).to(x.dtype)
