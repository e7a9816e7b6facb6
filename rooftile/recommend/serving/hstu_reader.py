"""`HSTUReader`: how a recommender of HSTU layers reads events into pages, and candidates beside them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftile.errors import InvalidInput, Unsupported
from rooftile.kvcache import Pages
from rooftile.recommend.hstu.layer import HSTU
from rooftile.recommend.hstu.model import HSTURecommender
from rooftile.recommend.hstu.paged.attention import hstu_attention_paged
from rooftile.recommend.serving.requests import Appended, Asked
from rooftile.recommend.serving.users import Rows, Users
from rooftile.runtime.arguments import check_count, shown


class HSTUReader:
    """A model, and the pages that it reads events into.

    Args:
        model: the recommender.
        blocks, block_size, dtype: of the pages.
        head, keep: as in `Scorer`.

    Raises:
        InvalidInput: `keep` leaves no place for further events.
        Unsupported: an event's row would change when further events come, or a page does not fit the layers.
    """

    most: int | None = None

    def __init__(
        self, model: HSTURecommender, blocks: int, block_size: int, dtype: torch.dtype, *,
        head: Callable[[Tensor], Tensor] | None, keep: int | None,
    ) -> None:  # fmt: skip
        self.model, self.head = model, head
        self.cut_to = None if keep is None else check_count("keep", keep)
        if self.cut_to is not None and self.cut_to >= model.longest:
            raise InvalidInput(f"keep is {keep}; must be below the model's longest, {model.longest}, so that further events fit")
        self.layers: list[HSTU] = []
        for layer in model.layers:
            assert isinstance(layer, HSTU)
            _check(layer)
            self.layers.append(layer)
        first, weight = self.layers[0], model.embedding.weight
        if any((layer.heads, layer.head_dim) != (first.heads, first.head_dim) for layer in self.layers):
            raise Unsupported("layers have different heads; pages have the same heads in all layers")
        self.timed = model.timed
        self.pages = Pages(
            blocks, len(self.layers), first.heads, first.head_dim, block_size=block_size, dtype=dtype, device=weight.device
        )
        # items and times serve to read the last events anew; a state is the model's row of the last event in a block
        self.items = self.pages.add_plane("items", block_size, dtype=torch.int64)
        self.times = self.pages.add_plane("times", block_size, dtype=torch.int64)
        self.states = self.pages.add_plane("states", model.embedding.embedding_dim, dtype=weight.dtype)

    def fitted(self, users: Users, given: Appended) -> tuple[Appended, bool]:
        """Cuts a history that would be too long to its last events, which are read anew: later ones have seen the oldest."""
        # behind a history that is cut a candidate has room
        longest = self.model.longest - (self.cut_to is not None)
        length, more = users.histories.length(given.user), given.events.shape[0]
        if length + more <= longest:
            return given, False
        if self.cut_to is None:
            raise InvalidInput(
                f"user {shown(given.user)} has {length:,} events and gets {more:,}; the model's longest is {longest:,}, and what "
                "later events have seen cannot be dropped: forget the user and append the last events, or give keep="
            )
        last = slice(-self.cut_to, None)
        if not length:
            return Appended(given.user, given.events[last], given.times[last]), False
        slots = users.slots(given.user)
        events, times = (plane.view(-1)[slots].cpu() for plane in (self.items, self.times))
        return Appended(given.user, torch.cat([events, given.events])[last], torch.cat([times, given.times])[last]), True

    def read(self, rows: Rows, slots: Tensor) -> Tensor:
        """Writes keys and values of all layers, items and times; returns the states (B, dim) after each user's last row."""
        self.items.view(-1)[slots] = rows.items
        self.times.view(-1)[slots] = rows.times
        x = self.model.embedded(rows.items, rows.places)
        for n, layer in enumerate(self.layers):
            u, q, k, v = layer.projected(x)
            self.pages.write(n, k, v, slots)
            x = layer.gated(x, self._attention(n, layer, q, rows, None), u)
        return x[rows.lines.cu[1:].long() - 1]

    def keep(self, states: Tensor, blocks: Tensor) -> None:
        """Keeps the states (B, dim) after users' last events, which are in the blocks (B,)."""
        self.states[blocks] = states.to(self.states.dtype)

    def scores(self, users: Users, asked: list[Asked]) -> list[Tensor]:
        """Returns the head's scores of candidates' states, or cosines of the last states and the items."""
        if self.head is None:
            return self._cosines(users, asked)
        scores, counts = self.head(self.candidate_states(users, asked)), [len(x.items) for x in asked if x.items is not None]
        if not isinstance(scores, Tensor) or scores.shape != (sum(counts),):
            raise InvalidInput(f"head has returned {shown(scores)}; must be a score per candidate, ({sum(counts)},)")
        return list(scores.split(counts))

    def candidate_states(self, users: Users, asked: list[Asked]) -> Tensor:
        """Returns the states (total, dim) of candidates, which do not see each other; writes nothing."""
        items = []
        for x in asked:
            length = users.histories.length(x.user)
            if x.items is None:
                raise InvalidInput(f"user {shown(x.user)} has no items; candidates are read one by one: give their numbers")
            if length >= self.model.longest:
                raise InvalidInput(
                    f"user {shown(x.user)} has {length:,} events, the model's longest; a candidate would stand behind them: "
                    "forget the user and append fewer, or give keep="
                )
            items.append(x.items)
        rows = users.candidates(asked, items)
        states = self.model.embedded(rows.items, rows.places)
        for n, layer in enumerate(self.layers):
            u, q, k, v = layer.projected(states)
            states = layer.gated(states, self._attention(n, layer, q, rows, (k, v)), u)
        return states

    def last_states(self, users: Users, asked: list[Asked]) -> Tensor:
        """Returns the states (B, dim) after users' last events."""
        for x in asked:
            if not users.histories.length(x.user):
                raise InvalidInput(f"user {shown(x.user)} has no events, so there is no state after the last one; append some")
        blocks = torch.tensor([users.histories.last_block(x.user) for x in asked], dtype=torch.int64)
        return self.states[blocks.to(self.states.device)]

    def _cosines(self, users: Users, asked: list[Asked]) -> list[Tensor]:
        for x in asked:
            if x.at is not None:
                raise InvalidInput(f"at is {x.at}, and without a head scores are of the last event's state: leave at out")
        states = self.last_states(users, asked)
        if all(x.items is None for x in asked):
            return list(self.model.scores(states))
        items = [torch.arange(self.model.items) if x.items is None else x.items for x in asked]
        which = [torch.full_like(x, n) for n, x in enumerate(items)]
        items_, which_ = users.on_device(items, which)
        pair = F.normalize(states, dim=-1)[which_].float() * F.normalize(self.model.embedding(items_), dim=-1).float()
        return list(pair.sum(-1).to(states.dtype).split([len(x) for x in items]))

    def _attention(self, n: int, layer: HSTU, q: Tensor, rows: Rows, candidates: tuple[Tensor, Tensor] | None) -> Tensor:
        timed, lines = layer.time_table is not None, rows.lines
        assert layer.scale is not None
        return hstu_attention_paged(
            q, self.pages.view(n, lines.table, lines.lengths, lines.cu), alpha=layer.alpha, scale=layer.scale, mask=layer.mask,
            bias=layer.bias, times=rows.times if timed else None, key_times=self.times if timed else None, candidates=candidates,
            backend=layer.backend,
        )  # fmt: skip


def _check(layer: HSTU) -> None:
    if layer.mask is None or layer.mask.right != 0:
        raise Unsupported(f"a layer's mask is {layer.mask}; events that see later ones would change when these are appended")
    if layer.mask.targets:
        raise Unsupported(
            f"a layer's mask is {layer.mask}; a row that is a target now would be an event later: leave Targets out"
        )
    if layer.scale is None:
        raise Unsupported("a layer's scale is None, which divides by the number of events: earlier rows would change as it grows")
    if layer.attention_dim != layer.head_dim:
        raise Unsupported(f"attention_dim is {layer.attention_dim} and head_dim is {layer.head_dim}; pages have one for both")
