"""The checks of a scorer's calls: from users, events and times as they come to tensors on the host, or one sentence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import shown, whole

INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


class Appended(NamedTuple):
    """Further events of a user, on the host."""

    user: Hashable
    events: Tensor  # (n,) int64
    times: Tensor  # (n,) int64; zeros if the model reads no times


class Asked(NamedTuple):
    """Candidates for a user, on the host; None for all items."""

    user: Hashable
    items: Tensor | None  # (n,) int64
    at: int | None


def check_appended(batch: Any, items: int, timed: bool, last_time: Callable[[Hashable], int | None]) -> list[Appended]:
    """Returns the users of a batch with their events and times, which rise from the last time that is known."""
    found: list[Appended] = []
    seen = set()
    for each in _entries(batch, (2, 3), "(user, events) or (user, events, times)"):
        user, events = check_user(each[0]), _integers("events", each[1])
        if user in seen:
            raise InvalidInput(f"user {shown(user)} comes twice in one call; join the events, in their order")
        seen.add(user)
        check_items(user, events, items)
        times = _times(user, events, each[2] if len(each) == 3 else None, timed, last_time(user))
        found.append(Appended(user, events, times))
    return found


def check_asked(batch: Any, items: int, at: Any, timed: bool) -> list[Asked]:
    """Returns the users of a batch with their candidates."""
    entries = _entries(batch, (1, 2), "(user, items)")
    moments = _moments(at, len(entries))
    if not timed and any(moment is not None for moment in moments):
        raise InvalidInput(f"at is {shown(at)}, and the model has no buckets of time; give it buckets, or leave at out")
    found = []
    for each, moment in zip(entries, moments, strict=True):
        candidates = None if len(each) == 1 or each[1] is None else _integers("items", each[1])
        if candidates is not None:
            check_items(each[0], candidates, items)
        found.append(Asked(check_user(each[0]), candidates, moment))
    return found


def check_user(user: Any) -> Hashable:
    if isinstance(user, Tensor):
        raise InvalidInput(f"user is {shown(user)}; must be a value that equals itself in the next call: an int or a str")
    try:
        hash(user)
    except TypeError:
        raise InvalidInput(f"user is {shown(user)}; must be hashable, such as an int or a str") from None
    # NaN would be a new user in each call, and no later call would find it
    if user != user:
        raise InvalidInput(f"user is {shown(user)}; must be a value that equals itself in the next call: an int or a str")
    return user  # type: ignore[no-any-return]


def check_items(user: Hashable, numbers: Tensor, items: int) -> None:
    """Raises InvalidInput if one of these is no item."""
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < items:
        worst = int(numbers.min()) if int(numbers.min()) < 0 else int(numbers.max())
        raise InvalidInput(f"user {shown(user)} has the item {worst}; items are 0 to {items - 1}")


def _entries(batch: Any, sizes: tuple[int, ...], form: str) -> list[Sequence[Any]]:
    if not isinstance(batch, Iterable) or isinstance(batch, (str, bytes, Tensor)):
        raise InvalidInput(f"the batch is {shown(batch)}; must be a list of {form}")
    entries = list(batch)
    for each in entries:
        if not isinstance(each, (tuple, list)) or len(each) not in sizes:
            raise InvalidInput(f"the batch has {shown(each)}; must have {form}")
    return entries


def _integers(name: str, numbers: Any) -> Tensor:
    """Whole numbers as int64 (n,) on the host."""
    if not isinstance(numbers, Tensor):
        if isinstance(numbers, (str, bytes)) or not isinstance(numbers, Iterable):
            raise InvalidInput(f"{name} is {shown(numbers)}; must be whole numbers: a tensor (n,) or a list")
        listed = [_int64(n) for n in numbers]
        if None in listed:
            raise InvalidInput(f"{name} is {shown(numbers)}; must be whole numbers of int64: a tensor (n,) or a list")
        return torch.tensor(listed, dtype=torch.int64)
    if numbers.ndim != 1 or numbers.dtype not in INTEGERS:
        raise InvalidInput(f"{name} is {shown(numbers)}; must be whole numbers: a tensor (n,) or a list")
    return numbers.detach().to("cpu", torch.int64)


def _int64(value: Any) -> int | None:
    number = whole(value)
    return None if number is None or not -(1 << 63) <= number < 1 << 63 else number


def _times(user: Hashable, events: Tensor, times: Any, timed: bool, last: int | None) -> Tensor:
    if times is None:
        if timed:
            raise InvalidInput(f"user {shown(user)} has events without times; the model has buckets of time: give seconds")
        return torch.zeros_like(events)
    if not timed:
        raise InvalidInput(f"user {shown(user)} has times, and the model has no buckets of time; give it buckets, or no times")
    times = _integers("times", times)
    if times.shape != events.shape:
        raise InvalidInput(f"user {shown(user)} has {events.shape[0]} events and {times.shape[0]} times; give one per event")
    falls = (times.diff() < 0).nonzero()
    if falls.numel():
        n = int(falls[0]) + 1
        raise InvalidInput(
            f"user {shown(user)}: times falls at event {n}, from {int(times[n - 1])} to {int(times[n])}; must rise"
        )
    if times.numel() and last is not None and int(times[0]) < last:
        raise InvalidInput(
            f"user {shown(user)}: times begins at {int(times[0])}, before the last known event's {last}; append events in order"
        )
    return times


def _moments(at: Any, count: int) -> list[int | None]:
    """The time of each user's candidates."""
    # arrays of numpy too; an array of no dimension is one moment
    several = isinstance(at, (list, tuple)) or getattr(at, "ndim", 0) == 1
    moments = list(at) if several else [at] * count
    if len(moments) != count:
        raise InvalidInput(f"at has {len(moments)} times for {count} users; give one for each, or one for all")
    found = [None if moment is None else _int64(moment) for moment in moments]
    for moment, number in zip(moments, found, strict=True):
        if moment is not None and number is None:
            raise InvalidInput(f"at is {shown(moment)}; must be whole seconds of int64, or None for the time of the last event")
    return found
