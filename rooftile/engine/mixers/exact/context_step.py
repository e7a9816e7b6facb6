"""Exact attention in one step to a cache whose tokens lie on several ranks.

Each rank attends to the keys that it holds. What it finds, o in fp32 and lse, is gathered from all ranks and merged, in the same
order on each. A single token sees all keys of its sequence, wherever they lie. The tokens of a chunk see

    the keys before the chunk     each rank attends to those that it holds; all are visible
    the chunk's own keys          every rank has computed all; each attends to those of some heads, under the causal mask

so no mask depends on which keys a rank holds. With a window it does: see `window_runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.mixers.exact.merging import merge
from rooftile.engine.mixers.exact.own_keys import OwnChunks, OwnKeys
from rooftile.engine.mixers.exact.window_runs import WindowRuns
from rooftile.engine.mixers.step import StepTokens
from rooftile.exact import reference
from rooftile.exact.api import prepare_paged
from rooftile.exact.masks import CAUSAL, FULL, Mask, Window
from rooftile.exact.spec import NO_OPTIONS, CallSettings
from rooftile.kvcache import PagedKV, Rotation
from rooftile.kvcache.caches import Caches

# bytes of what is gathered at once
MOST_GATHERED = 1 << 28


class ContextLayers(NamedTuple):
    """The layers of a model that attend over several ranks.

    Args:
        caches: this rank's caches.
        windows: how many keys a query of each layer sees; None for all.
        settings: scale and softcap, with o in fp32.
        sinks: the sinks (H,) of layers that have them.
        own: the cache of a chunk's own keys.
    """

    caches: Caches
    windows: tuple[int | None, ...]
    settings: CallSettings
    sinks: Mapping[int, Tensor]
    own: OwnKeys


class ContextStep:
    """Writes a layer's keys and values into the cache, and attends to all ranks' caches; for the layers of one step.

    Args:
        layers: the layers.
        step: where the tokens are.
    """

    def __init__(self, layers: ContextLayers, step: StepTokens) -> None:
        share = layers.caches.share
        assert share is not None
        self.layers, self.step, self.share = layers, step, share
        self.pages, self.places = layers.caches.pages, layers.caches.places
        self._chunks = None if step.chunks is None else OwnChunks.of(step, share, layers.own)
        self._single = None if step.single is None else (step.single[0], share.held(step.single[1]).int())
        self._runs: dict[int, WindowRuns] = {}
        self._prepared: dict[tuple[object, Mask], Callable[..., tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, *more: Tensor) -> Tensor:
        """Computes the attention of one layer; see `rooftile.models.Attend`."""
        q_rotated = self.pages.write_and_rotate(self.places[layer], q, k, v, self.step.cells, rotation)
        split, found, window = self.step.split, [], self.layers.windows[layer]
        if self._chunks is not None and window is None:
            self.layers.own.write(k, v, self._chunks.cells, rotation)
            found.append(self._attend_chunks(layer, self._chunks, q_rotated[:split]))
        elif self._chunks is not None and window is not None:
            found.append(self._attend_windows(layer, window, q_rotated[:split]))
        if self._single is not None:
            found.append(self._attend_single(layer, window, q_rotated[split:]))
        o, lse = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        return self._merge(o, lse, self.layers.sinks.get(layer), q.dtype)

    def _attend_single(self, layer: int, window: int | None, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns o (n, H, D) and lse (n, H) of single tokens over this rank's keys."""
        assert self._single is not None
        mask = CAUSAL if window is None else CAUSAL & Window(window // self.share.ranks - 1)
        o, lse = self._attend("single", mask, q[:, None], self.pages.view(self.places[layer], *self._single))
        return o.squeeze(1), lse.squeeze(2)

    def _attend_chunks(self, layer: int, chunks: OwnChunks, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same of chunks, over this rank's earlier keys and its heads' part of the chunks' own."""
        if chunks.follow:
            assert self.step.chunks is not None
            before = self.pages.view(self.places[layer], self.step.chunks.table, chunks.before, self.step.chunks.cu_q)
            o, lse = self._attend("before", FULL, q, before)
        else:
            o = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
            lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
        own = self.layers.own
        if own.heads:
            part = self._attend("own", CAUSAL, q[:, own.queries].contiguous(), own.view(chunks))
            if chunks.follow:
                part = reference.merge([(o[:, own.queries], lse[own.queries]), part])
            o[:, own.queries], lse[own.queries] = part
        return o, lse.T

    def _attend_windows(self, layer: int, window: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same of chunks behind a window, over this rank's keys."""
        runs = self._runs.get(window)
        if runs is None:
            runs = self._runs[window] = WindowRuns.of(self.step, self.share, window)
        o = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        masks = CAUSAL & Window(window // self.share.ranks - 1), FULL
        for name, part, mask in zip(("held", "others"), runs, masks, strict=True):
            if part is not None:
                cache = self.pages.view(self.places[layer], part.table, part.lengths, part.cu_q)
                its_o, its_lse = self._attend((name, window), mask, q.index_select(0, part.rows), cache)
                o.index_copy_(0, part.rows, its_o)
                lse.index_copy_(0, part.rows, its_lse.T)
        return o, lse

    def _attend(self, name: object, mask: Mask, q: Tensor, cache: PagedKV) -> tuple[Tensor, Tensor]:
        """Returns o in fp32 and lse; calls of one name differ in nothing but tensors' contents."""
        attend = self._prepared.get((name, mask))
        if attend is None:
            attend = self._prepared[name, mask] = prepare_paged(q, cache, mask, NO_OPTIONS, self.layers.settings)
        return attend(q, cache)

    def _merge(self, o: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Returns o (n, H, D) over the keys of all ranks, from o and lse (n, H) over this rank's."""
        both = torch.cat((o, lse[..., None]), -1)
        rows = max(MOST_GATHERED // (self.share.ranks * both[0].nbytes), 1)
        found = [merge(self.share.gather(part), sinks, dtype) for part in both.split(rows)]
        return found[0] if len(found) == 1 else torch.cat(found)


def merged_bytes(tokens: int, heads: int, dim: int, ranks: int) -> int:
    """Returns the bytes that a layer takes in a step of this many tokens, to merge what the ranks have found."""
    part = tokens * heads * (dim + 1) * torch.float32.itemsize
    # o, and o with its lse; all ranks' parts of some rows, and as much again while they are merged
    return 2 * part + 2 * min(ranks * part, MOST_GATHERED)
