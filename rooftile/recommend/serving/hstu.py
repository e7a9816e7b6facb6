"""`HSTUReader`: how a recommender of HSTU layers reads events into pages, and candidates beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.kvcache import Pages
from rooftile.kvcache.histories import Lines
from rooftile.recommend.hstu.layer import HSTU
from rooftile.recommend.hstu.model import HSTURecommender
from rooftile.recommend.hstu.paged.attention import hstu_attention_paged
from rooftile.runtime.arguments import shown


class HSTUReader:
    """A model, and the pages that it reads events into.

    Args:
        model: the recommender.
        blocks, block_size: of the pages.
        dtype: of the pages.

    Raises:
        Unsupported: an event's row would change when further events come, or a page does not fit the layers.
    """

    def __init__(self, model: HSTURecommender, blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.model = model
        self.layers: list[HSTU] = []
        for layer in model.layers:
            assert isinstance(layer, HSTU)
            _check(layer)
            self.layers.append(layer)
        first, weight = self.layers[0], model.embedding.weight
        if any((layer.heads, layer.head_dim) != (first.heads, first.head_dim) for layer in self.layers):
            raise Unsupported("layers have different heads; pages have the same heads in all layers")
        self.timed = any(layer.time_table is not None for layer in self.layers)
        self.pages = Pages(
            blocks, len(self.layers), first.heads, first.head_dim, block_size=block_size, dtype=dtype, device=weight.device
        )
        # items and times serve to read the last events anew; a state is the model's row of the last event in a block
        self.items = self.pages.add_plane("items", block_size, dtype=torch.int64)
        self.times = self.pages.add_plane("times", block_size, dtype=torch.int64)
        self.states = self.pages.add_plane("states", model.embedding.embedding_dim, dtype=weight.dtype)

    def read(self, items: Tensor, times: Tensor, places: Tensor, slots: Tensor, lines: Lines) -> Tensor:
        """Reads events (total,), each user's last, into their slots; lengths count them already.

        Returns the states (B, dim) after each user's last row, which it does not keep: see `keep`.
        """
        self.items.view(-1)[slots] = items
        self.times.view(-1)[slots] = times
        x = self.model.embedded(items, places)
        for n, layer in enumerate(self.layers):
            u, q, k, v = layer.projected(x)
            self.pages.write(n, k, v, slots)
            x = layer.gated(x, self._attention(n, layer, q, lines, times, None), u)
        return x[lines.cu[1:].long() - 1]

    def keep(self, states: Tensor, blocks: Tensor) -> None:
        """Keeps the states (B, dim) after users' last events, which are in the blocks (B,)."""
        self.states[blocks] = states.to(self.states.dtype)

    def candidates(self, items: Tensor, times: Tensor, places: Tensor, lines: Lines) -> Tensor:
        """Returns the states (total, dim) of candidates (total,), which do not see each other; writes nothing."""
        x = self.model.embedded(items, places)
        for n, layer in enumerate(self.layers):
            u, q, k, v = layer.projected(x)
            x = layer.gated(x, self._attention(n, layer, q, lines, times, (k, v)), u)
        return x

    def _attention(
        self, n: int, layer: HSTU, q: Tensor, lines: Lines, times: Tensor, candidates: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        timed = layer.time_table is not None
        assert layer.scale is not None
        return hstu_attention_paged(
            q, self.pages.view(n, lines.table, lines.lengths, lines.cu), alpha=layer.alpha, scale=layer.scale, mask=layer.mask,
            bias=layer.bias, times=times if timed else None, key_times=self.times if timed else None, candidates=candidates,
            backend=layer.backend,
        )  # fmt: skip


def _check(layer: HSTU) -> None:
    if layer.mask is None or layer.mask.right != 0:
        raise Unsupported(f"a layer's mask is {layer.mask}; events that see later ones would change when these are appended")
    if layer.scale is None:
        raise Unsupported("a layer's scale is None, which divides by the number of events: earlier rows would change as it grows")
    if layer.attention_dim != layer.head_dim:
        raise Unsupported(f"attention_dim is {layer.attention_dim} and head_dim is {layer.head_dim}; pages have one for both")


def check_model(model: object) -> HSTURecommender:
    if not isinstance(model, HSTURecommender):
        raise InvalidInput(f"model is {shown(type(model).__name__)}; must be a rooftile.recommend.HSTURecommender")
    return model
