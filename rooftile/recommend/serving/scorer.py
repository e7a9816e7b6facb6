"""`Scorer`: users' histories stay on the device; new events are appended to them, and items are scored against them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.kvcache.operators import LARGEST
from rooftile.kvcache.specs import bytes_in_words
from rooftile.recommend.hstu.model import HSTURecommender
from rooftile.recommend.serving.hstu_reader import HSTUReader
from rooftile.recommend.serving.requests import Asked, check_appended, check_asked, check_user
from rooftile.recommend.serving.target_reader import TargetReader
from rooftile.recommend.serving.users import Reader, Users
from rooftile.recommend.target.model import TargetRecommender
from rooftile.runtime.arguments import check_count, shown
from rooftile.runtime.words import answers_foreign_words, answers_words

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
READERS: dict[type, Callable[..., Reader]] = {HSTURecommender: HSTUReader, TargetRecommender: TargetReader}


@answers_words
class Scorer:
    """Serves a trained recommender: keeps what it has read of each user, so that an event costs one row and not a history.

    Each user has keys and values of all layers in pages. `append` computes the rows of new events alone; `score` reads a history
    once for all candidates and writes nothing. When room runs out, the user who was not used longest is forgotten as a whole.
    Scores equal those of the model over the whole history, up to rounding.

    Args:
        model: an `HSTURecommender`, whose layers are causal and have a fixed scale, or a `TargetRecommender`; it is put into
            evaluation mode. To train it further, give the scorer a copy, or `clear` it afterwards.
        room: how many events of all users there is room for.
        block_size: events per block, a power of two; a user wastes half a block on average.
        head: turns the states (n, dim) of candidates into scores (n,), as a ranking model was trained. None scores by the cosine
            of the state after the user's last event and the item, as `HSTURecommender.scores` does. A `TargetRecommender` takes
            none: its scores are the probabilities of `TargetRecommender.scores`.
        keep: how many of the last events stay when a history gets too long. An `HSTURecommender` reads them anew when a history
            would reach `model.longest`, which leaves no place for candidates; None refuses a longer one. For a
            `TargetRecommender` older events are too many: they are forgotten, and nothing is read anew; None keeps the events
            that its `last=` reads, or all.
        kv_dtype: of the pages: "auto" for the model's, "bfloat16", "float16" or "float32", or "fp8" and "int8" with a scale per
            head of an event.

    Calls from several threads wait for each other.

    Raises:
        InvalidInput, Unsupported: an argument is wrong, or the model cannot be served.

    Example:
        >>> model = HSTURecommender(1000, dim=32, layers=2, longest=64, buckets=8)
        >>> scorer = Scorer(model, room=4096)
        >>> scorer.append("ann", [3, 17, 5], times=[100, 160, 1000])
        3
        >>> scorer.append("ann", [8], times=[2000])
        4
        >>> scorer.score("ann", [7, 9, 11]).shape
        torch.Size([3])
        >>> clicks = Scorer(TargetRecommender(1000, search="exact", top_k=20), room=4096)
        >>> clicks.append("ann", [3, 17, 5])
        3
        >>> clicks.score("ann", [7, 9]).shape
        torch.Size([2])
    """

    def __init__(
        self, model: HSTURecommender | TargetRecommender, *, room: int, block_size: int = 16,
        head: Callable[[Tensor], Tensor] | None = None, keep: int | None = None, kv_dtype: str | torch.dtype = "auto",
    ) -> None:  # fmt: skip
        room, block_size = check_count("room", room), check_count("block_size", block_size)
        if head is not None and not callable(head):
            raise InvalidInput(f"head is {shown(head)}; must turn states (n, dim) into scores (n,), or be None")
        reader = next((reader for kind, reader in READERS.items() if isinstance(model, kind)), None)
        if reader is None:
            due = " or ".join(f"rooftile.recommend.{kind.__name__}" for kind in READERS)
            raise InvalidInput(f"model is {shown(type(model).__name__)}; must be a {due}")
        self.model = model.eval()
        dtype = _dtype_of(kv_dtype, model.embedding.weight.dtype)
        # pages that are made in inference mode could not be written outside of it
        with torch.inference_mode(False):
            self._reader = reader(self.model, -(-room // block_size), block_size, dtype, head=head, keep=keep)
        self._users = Users(self._reader)
        self.histories = self._users.histories
        self._lock = RLock()
        self._weights, self._form = self._stamp(), self._forms()

    def __len__(self) -> int:
        return len(self.histories)

    def __contains__(self, user: Hashable) -> bool:
        return user in self.histories

    def __iter__(self) -> Iterator[Hashable]:
        """Yields users, the least recently used first."""
        with self._lock:
            return iter(self.histories)

    def __repr__(self) -> str:
        return f"Scorer({self})"

    def __str__(self) -> str:
        with self._lock:
            return f"{self.histories}; an event takes {self._event_in_words()}"

    def memory(self, user: Hashable) -> str:
        """Says how many bytes a user's history takes."""
        with self._lock:
            return self.histories.in_words(check_user(user))

    @answers_foreign_words
    def append(self, user: Hashable, events: Tensor | Sequence[int], times: Tensor | Sequence[int] | None = None) -> int:
        """Appends events to a user's history, which begins if the user is unknown; returns how many events it has now.

        Args:
            user: any hashable value.
            events: item numbers (n,), in their order; none makes a user without events.
            times: seconds (n,), rising, also from the user's last event; for a model with buckets, and no other.

        Raises:
            InvalidInput: an argument is wrong, the history would be too long, or there is too little room; nothing has changed.
        """
        return self.append_many([(user, events, times)])[0]

    def append_many(self, batch: Iterable[tuple[Any, ...]]) -> list[int]:
        """Appends events of several users at once: (user, events) or (user, events, times) each; returns their lengths."""
        with self._lock, torch.no_grad():
            self._check_weights()
            return self._users.append(check_appended(batch, self.model.items, self._reader.timed, self._users.last_time))

    @answers_foreign_words
    def score(self, user: Hashable, items: Tensor | Sequence[int] | None = None, at: int | None = None) -> Tensor:
        """Scores items for a user; returns (n,).

        Args:
            user: a user whose events were appended.
            items: item numbers (n,); None for all items, where there is no `head`.
            at: seconds at which candidates are shown, for a model with buckets; not before the last event, whose time it is if
                None. Cosines, the scores of an `HSTURecommender` without a `head`, take none.

        Raises:
            InvalidInput: the user is unknown, or an argument is wrong.
        """
        return self.score_many([(user, items)], at=at)[0]

    @answers_foreign_words
    def score_many(self, batch: Iterable[tuple[Any, ...]], *, at: int | Sequence[int | None] | None = None) -> list[Tensor]:
        """Scores items for several users at once: (user, items) each, any number of items.

        Args:
            batch: the users and items; a user may come twice.
            at: as in `score`; one time for all, or one for each.
        """
        with self._lock, torch.no_grad():
            return self._reader.scores(self._users, self._asked(batch, at))

    @answers_foreign_words
    def candidate_states(self, user: Hashable, items: Tensor | Sequence[int], at: int | None = None) -> Tensor:
        """Returns the states (n, dim) of candidates as an `HSTURecommender` reads them behind the history.

        Each sees the history and itself.
        """
        with self._lock, torch.no_grad():
            return self._reader.candidate_states(self._users, self._asked([(user, items)], at))

    def state(self, user: Hashable) -> Tensor:
        """Returns the state (dim,) of an `HSTURecommender` after a user's last event."""
        with self._lock, torch.no_grad():
            return self._reader.last_states(self._users, self._asked([(user,)], None))[0].clone()

    def forget(self, user: Hashable) -> bool:
        """Forgets a user; returns whether the user was known."""
        with self._lock:
            return self.histories.forget(check_user(user))

    def clear(self) -> None:
        """Forgets all users, for instance since the model has learned."""
        with self._lock:
            for user in self:
                self.forget(user)
            self._weights = self._stamp()

    def _asked(self, batch: Any, at: Any) -> list[Asked]:
        """The users of a call, who count as used."""
        self._check_weights()
        asked = check_asked(batch, self.model.items, at, self._reader.timed)
        for x in asked:
            self.histories.use(x.user)
            last = self._users.last_time(x.user)
            if x.at is not None and last is not None and x.at < last:
                raise InvalidInput(f"at is {x.at} for user {shown(x.user)}, whose last event is at {last}; must not be before it")
        return asked

    def _stamp(self) -> list[tuple[int, int]]:
        """Changes with the model's weights, and with its tables of categories and planes of hashes."""
        tensors = chain(self.model.parameters(), self.model.buffers())
        return [(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors]

    def _forms(self) -> list[tuple[Any, ...]]:
        """Shapes, dtypes and devices that pages and planes were made for."""
        return [(x.shape, x.dtype, x.device) for x in self.model.parameters()]

    def _check_weights(self) -> None:
        if self.model.training:
            raise InvalidInput("the model is in training mode, with dropout; call model.eval() before it is served")
        if self._forms() != self._form:
            raise InvalidInput("the model has other shapes, dtypes or devices than its pages were made for; make another Scorer")
        if len(self) and self._stamp() != self._weights:
            raise InvalidInput("the model's weights have changed since users were read; call clear(), and append them again")
        self._weights = self._stamp()

    def _event_in_words(self) -> str:
        storage, planes = self._reader.pages.storage, self._reader.pages.planes
        blocks, layers, _, size, heads, dim = storage.shape
        per_head = f"({dim} bytes + 4 of scale)" if storage.dtype in LARGEST else f"{dim} dims x {storage.element_size()} bytes"
        beside = "".join(f" + {plane.nbytes / (blocks * size):g} of {name}" for name, plane in planes.items())
        each = self.histories.block_bytes / size
        return f"{layers} layer{'s' * (layers > 1)} x 2 x {heads} heads x {per_head}{beside} = {bytes_in_words(each)}"


def _dtype_of(kv_dtype: Any, own: torch.dtype) -> torch.dtype:
    if kv_dtype == "auto":
        return own
    word = str(kv_dtype).removeprefix("torch.")
    if word in EIGHT_BITS:
        return EIGHT_BITS[word]
    if word not in FLOATS:
        raise InvalidInput(f"kv_dtype is {shown(kv_dtype)}; must be 'auto', {', '.join(map(repr, (*FLOATS, *EIGHT_BITS)))}")
    return FLOATS[word]
