"""`TargetReader`: how a recommender of target attention reads events into pages, and candidates against them.

An event's key and value depend on no other event, so appending writes rows, and the oldest can be forgotten. Whatever else the
model reads of an event is kept beside the pages: its time, and what the search compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from rooftile.errors import InvalidInput, Unsupported
from rooftile.kvcache import Pages
from rooftile.recommend.serving.requests import Appended, Asked
from rooftile.recommend.serving.users import Rows, Users
from rooftile.recommend.target.model import History, TargetRecommender
from rooftile.runtime.arguments import check_count

# the planes of searches that do not read keys
KEPT = {"category": "categories", "embedding": "items", "lsh": "hashes"}
# numbers of keys and values that are copied out of pages at once: a bound of the memory that a call takes
MOST_COPIED = 1 << 26


class TargetReader:
    """A model, and the pages that it reads events into.

    Args:
        model: the recommender.
        blocks, block_size, dtype: of the pages.
        head, keep: as in `Scorer`.

    Raises:
        InvalidInput: `head` came, or `keep` is more than the model reads.
    """

    def __init__(
        self, model: TargetRecommender, blocks: int, block_size: int, dtype: torch.dtype, *,
        head: Callable[[Tensor], Tensor] | None, keep: int | None,
    ) -> None:  # fmt: skip
        if head is not None:
            raise InvalidInput("head came, and a TargetRecommender scores candidates by its own network; leave head out")
        self.most = model.last if keep is None else check_count("keep", keep)
        if model.last is not None and self.most is not None and self.most > model.last:
            raise InvalidInput(f"keep is {keep}; the model reads the last {model.last} events: give no more, or leave keep out")
        self.model, self.timed = model, model.timed
        heads, device = model.heads, model.embedding.weight.device
        self.pages = Pages(blocks, 1, heads, model.dim // heads, block_size=block_size, dtype=dtype, device=device)
        self.times = self.pages.add_plane("times", block_size, dtype=torch.int64) if self.timed else None
        self.searched: Tensor | None = None
        with torch.no_grad():
            kept = self._rows(torch.zeros(1, dtype=torch.int64, device=device))[2]
        if kept is not None and model.search is not None:
            self.searched = self.pages.add_plane(KEPT[model.search], block_size, *kept.shape[1:], dtype=kept.dtype)

    def fitted(self, users: Users, given: Appended) -> tuple[Appended, bool]:
        """Returns the last events that candidates read."""
        last = slice(None if self.most is None else -self.most, None)
        return Appended(given.user, given.events[last], given.times[last]), False

    def read(self, rows: Rows, slots: Tensor) -> None:
        """Writes keys and values, times, and what the search compares."""
        keys, values, kept = self._rows(rows.items)
        self.pages.write(0, keys, values, slots)
        if self.times is not None:
            self.times.view(-1)[slots] = rows.times
        if self.searched is not None and kept is not None:
            self.searched.flatten(0, 1)[slots] = kept

    def keep(self, states: Tensor, blocks: Tensor) -> None:
        """Does nothing: there are no states."""

    def scores(self, users: Users, asked: list[Asked]) -> list[Tensor]:
        """Returns the probabilities (n,) of each user's candidates."""
        found: list[Tensor] = []
        for part in self._parts(users, asked):
            items = [torch.arange(self.model.items) if x.items is None else x.items for x in part]
            rows = users.candidates(part, items)
            logits = self.model.logits(rows.items, self._history(users, part, rows), rows.lines.cu)
            found += logits.sigmoid().split([len(x) for x in items])
        return found

    def candidate_states(self, users: Users, asked: list[Asked]) -> Tensor:
        raise Unsupported("a TargetRecommender has no states: its candidates read events alone; call score, or score_many")

    def last_states(self, users: Users, asked: list[Asked]) -> Tensor:
        raise Unsupported("a TargetRecommender has no states: its candidates read events alone; call score, or score_many")

    def _parts(self, users: Users, asked: list[Asked]) -> Iterator[list[Asked]]:
        """Yields parts of a call whose histories are copied out of the pages at once."""
        part: list[Asked] = []
        longest = 0
        for x in asked:
            length = users.histories.length(x.user)
            # a copy has room for as many events of each user as the longest history has
            if part and (len(part) + 1) * max(longest, length) * 2 * self.model.dim > MOST_COPIED:
                yield part
                part, longest = [], 0
            part.append(x)
            longest = max(longest, length)
        if part:
            yield part

    def _history(self, users: Users, asked: list[Asked], rows: Rows) -> History:
        """Copies users' events out of the pages, those that candidates read."""
        lines, books = rows.lines, users.histories
        stored, total = sum(books.length(x.user) for x in asked), sum(users.length(x.user) for x in asked)
        lengths = lines.lengths.long()
        read = lengths if self.most is None else lengths.clamp(max=self.most)
        cu = pad(read.cumsum(0), (1, 0))
        user = torch.repeat_interleave(read, output_size=total)
        place = torch.arange(total, device=user.device) - (cu[1:] - lengths)[user]
        keys, values, first = self.pages.view(0, lines.table, lines.lengths).gathered_with_room(self.model.query.weight.dtype)
        keys, values = keys[:stored], values[:stored]
        if total < stored:
            # the first block of a history that was cut has events that are too old
            at = first[user] + place
            keys, values = keys[at], values[at]
        slots, ages, compared = books.slots(lines._replace(user=user), place), None, None
        if self.times is not None:
            now = users.on_device([torch.tensor([users.moment(x) for x in asked], dtype=torch.int64)])
            ages = now[0, user] - self.times.view(-1)[slots]
        if self.searched is not None:
            kept = self.searched.flatten(0, 1)[slots]
            compared = self.model.embedded(kept)[:, None] if self.model.search == "embedding" else kept
        return History(keys, values, cu, ages, compared)

    def _rows(self, items: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns keys and values (total, H, D) of events (total,), and what is kept of them for the search.

        A search by embeddings keeps items, and looks their embeddings up: these would be half as wide as keys and values.
        """
        known = self.model.embedded(items)
        keys, values = self.model.keys_and_values(known)
        return keys, values, items if self.model.search == "embedding" else self.model.search_keys(items, known, keys)
