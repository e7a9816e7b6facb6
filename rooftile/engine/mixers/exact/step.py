"""Exact attention to the cache in one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from rooftile.engine.mixers.step import StepTokens
from rooftile.exact.api import prepare_paged
from rooftile.exact.masks import Mask
from rooftile.exact.spec import NO_OPTIONS, CallSettings, Options
from rooftile.kvcache import PagedKV, Rotation
from rooftile.kvcache.caches import Caches

NO_SINKS: Mapping[int, Options] = MappingProxyType({})


class ExactStep:
    """Writes a layer's keys and values into the cache, and computes exact attention to it; for the layers of one step.

    Args:
        caches: the caches.
        masks: the mask of each layer.
        settings: scale, softcap and the like.
        step: where the tokens are.
        options: the sinks of layers that have them.
    """

    def __init__(
        self, caches: Caches, masks: tuple[Mask, ...], settings: CallSettings, step: StepTokens,
        options: Mapping[int, Options] = NO_SINKS,
    ) -> None:  # fmt: skip
        self.pages, self.places = caches.pages, caches.places
        self.masks, self.settings, self.step, self.options = masks, settings, step, options
        # layers differ only in their masks and sinks: a call prepared for one layer serves all with the same mask
        self._prepared: dict[tuple[Mask, bool], Callable[..., tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
        """Computes the attention of one layer; see `rooftile.models.Attend`."""
        q = self.write(layer, q, k, v, rotation)
        split, found = self.step.split, []
        if self.step.chunks is not None:
            found.append(self._attend_chunks(layer, q[:split]))
        if self.step.single is not None:
            found.append(self.decode(layer, q[split:]))
        return found[0] if len(found) == 1 else torch.cat(found)

    def write(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        """Writes keys and values into the cache, keys rotated; returns the queries rotated."""
        return self.pages.write_and_rotate(self.places[layer], q, k, v, self.step.cells, rotation)

    def decode(self, layer: int, q: Tensor) -> Tensor:
        """Computes the attention of single tokens (B, H, D)."""
        assert self.step.single is not None
        return self._attend(layer, q[:, None], self.pages.view(self.places[layer], *self.step.single)).squeeze(1)

    def _attend_chunks(self, layer: int, q: Tensor) -> Tensor:
        chunks = self.step.chunks
        assert chunks is not None
        return self._attend(layer, q, self.pages.view(self.places[layer], chunks.table, chunks.lengths, chunks.cu_q))

    def _attend(self, layer: int, q: Tensor, cache: PagedKV) -> Tensor:
        kind, options = (self.masks[layer], q.dim() == 4), self.options.get(layer, NO_OPTIONS)
        if kind not in self._prepared:
            self._prepared[kind] = prepare_paged(q, cache, self.masks[layer], options, self.settings)
        return self._prepared[kind](q, cache, options)[0]
