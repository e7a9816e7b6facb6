"""Masks: the keys that each query sees.

Under every mask here, a query sees one *interval* of keys, and both ends of that interval rise with the query's position.
Intersections keep that property. A tiled kernel needs nothing else: two numbers per query give the tiles that hold visible
pairs, no mask is ever stored, and the backward finds the queries of a key in the same way.

Positions are on the key axis. A query's position is `t + S - T` (aligned bottom-right: the last query sees the last key);
it is negative for the first queries when T > S.

    FULL                  every key
    CAUSAL                j <= i
    Window(left, right)   i - left <= j <= i + right, both inclusive; None for no bound
    Prefix(n)             j < n or j <= i
    Chunk(n)              j // n == i // n
    a & b                 the keys that both show

One condition is no interval: under `Targets(n)` the last n queries are candidates that are scored together. Each sees the keys
before the last n, as the query right after them would, and itself. `rooftile.exact.targets` makes intervals of it, so no spec and
no backend ever holds one.

`rooftile mask "CAUSAL & Window(4)"` draws a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftile.drawing import notebook as shown
from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.arguments import whole
from rooftile.runtime.words import answers_foreign_words, answers_words

if TYPE_CHECKING:
    import torch


@answers_words
@dataclass(frozen=True, slots=True, repr=False)
class Mask:
    """An intersection of window, prefix, chunk and target conditions in normal form: equal masks compare equal.

    Make one with FULL, CAUSAL, Window, Prefix, Chunk, Targets and `&`, not by calling this class.
    """

    left: int | None = None
    right: int | None = None
    prefix: int | None = None
    chunks: tuple[int, ...] = ()
    targets: int = 0

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        chunks = {*self.chunks, *other.chunks}
        # a chunk size that is a multiple of another adds nothing
        chunks = {n for n in chunks if not any(m != n and n % m == 0 for m in chunks)}
        right = _least(self.right, other.right)
        # the prefix of a causal mask adds nothing: j <= i already holds
        prefix = None if right == 0 else _least(self.prefix, other.prefix)
        targets = max(self.targets, other.targets)
        return Mask(_least(self.left, other.left), right, prefix, tuple(sorted(chunks)), targets)

    def __or__(self, other: object) -> Mask:
        raise InvalidInput(
            f"{self} | {other}: a union of masks is no interval; join masks by &, write a boolean bias=, "
            "or merge two calls over disjoint keys"
        )

    __ror__ = __or__

    def __invert__(self) -> Mask:
        raise InvalidInput(f"~{self}: what a mask hides is no interval; write a boolean bias=")

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self == FULL

    @property
    def over_history(self) -> Mask:
        """The same mask without targets: what queries of the history see, and what a target sees of it."""
        return Mask(self.left, self.right, self.prefix, self.chunks)

    def check_intervals(self, user: str) -> None:
        """Raises Unsupported for a mask with targets, in the name of a user that reads a mask as intervals."""
        if self.targets:
            raise Unsupported(
                f"mask {self} in {user}; has masks without targets: attention, attention_packed (both also with_lse) and "
                "hstu_attention take Targets"
            )

    def first_key(self, i: Any) -> Any:
        """The first key that position `i` sees, not clipped to the existing keys. Ints or integer tensors."""
        self.check_intervals("a computation over intervals of keys")
        low = -UNBOUNDED + 0 * i
        if self.left is not None:
            low = i - self.left
        for n in self.chunks:
            low = _max(low, i // n * n)
        return low

    def last_key(self, i: Any) -> Any:
        """The last key that position `i` sees, not clipped; less than `first_key` if it sees none."""
        self.check_intervals("a computation over intervals of keys")
        high = UNBOUNDED + 0 * i
        if self.right is not None:
            high = i + self.right
        if self.prefix is not None:
            high = _min(high, _max(i, self.prefix - 1 + 0 * i))
        for n in self.chunks:
            high = _min(high, i // n * n + n - 1)
        return high

    def first_query(self, j: int) -> int:
        """The first position whose `last_key` reaches key `j`."""
        self.check_intervals("a computation over intervals of keys")
        low = -UNBOUNDED
        if self.right is not None:
            low = j - self.right
        if self.prefix is not None and j >= self.prefix:
            low = max(low, j)
        for n in self.chunks:
            low = max(low, j // n * n)
        return low

    def last_query(self, j: int) -> int:
        """The last position whose `first_key` does not pass key `j`."""
        self.check_intervals("a computation over intervals of keys")
        high = UNBOUNDED
        if self.left is not None:
            high = j + self.left
        for n in self.chunks:
            high = min(high, j // n * n + n - 1)
        return high

    def __str__(self) -> str:
        words = []
        if self.right == 0:
            words.append("causal")
        if self.left is not None or self.right not in (None, 0):
            words.append(f"window({self.left}, {self.right})" if self.right != 0 else f"window({self.left})")
        if self.prefix is not None:
            words.append(f"prefix({self.prefix})")
        words += [f"chunk({n})" for n in self.chunks]
        words += [f"targets({self.targets})"] if self.targets else []
        return " & ".join(words) or "full"

    def __repr__(self) -> str:
        """Returns the expression that makes the mask."""
        words = ["CAUSAL"] if self.right == 0 else []
        sides = [self.left] if self.right in (None, 0) else [self.left, self.right]
        if any(side is not None for side in sides):
            words.append(f"Window({', '.join(map(str, sides))})")
        words += [f"Prefix({self.prefix})"] if self.prefix is not None else []
        words += [f"Chunk({n})" for n in self.chunks]
        words += [f"Targets({self.targets})"] if self.targets else []
        return " & ".join(words) or "FULL"

    def _repr_html_(self) -> str:
        """Draws the mask over as many tokens as show its bounds, a line for each of up to 64 queries."""
        bounds = [n for n in (self.left, self.right, self.prefix, *self.chunks, self.targets) if n is not None]
        N = max(16, 4 * min(max(bounds, default=0), UNBOUNDED // 4))
        lines = min(N, 64)
        rows = []
        for n in range(lines):
            rows.append([(start / N, stop / N) for start, stop in _runs(self, n * N // lines, N, N)])
        words = f"{self!r}: queries run down, keys across, {N:,} of each; filled is visible"
        return shown.card(shown.sentence(words), shown.spans(rows))


# beyond any position, and small enough that sums of a few stay within int32
UNBOUNDED = 1 << 29

FULL = Mask()
CAUSAL = Mask(right=0)


@answers_foreign_words
def Window(left: int | None, right: int | None = None) -> Mask:  # noqa: N802 - reads as a noun, like CAUSAL
    """Sees i - left <= j <= i + right, both ends inclusive; None leaves a side open.

    >>> str(CAUSAL & Window(1024))
    'causal & window(1024)'
    """
    return Mask(left=_bound(left, "Window: left"), right=_bound(right, "Window: right"))


@answers_foreign_words
def Prefix(n: int) -> Mask:  # noqa: N802
    """Sees j < n or j <= i: a prefix that all queries see, causal after it."""
    # no prefix at all is causal
    n = _size(n, "Prefix: n", 0)
    return Mask(prefix=n) if n else CAUSAL


@answers_foreign_words
def Chunk(n: int) -> Mask:  # noqa: N802
    """Sees j // n == i // n: blocks of n tokens that do not see each other."""
    return Mask(chunks=(_size(n, "Chunk: n", 1),))


@answers_foreign_words
def Targets(n: int) -> Mask:  # noqa: N802
    """Makes the last n queries candidates: each sees the keys before the last n, as the query right after them would, and itself.

    No query sees another's target. Both the queries and the keys of a sequence end with its n targets.

    >>> from rooftile.exact.masks import draw
    >>> draw(CAUSAL & Targets(2), 5, 5).split()
    ['#....', '##...', '###..', '####.', '###.#']
    """
    return Mask(targets=_size(n, "Targets: n", 0))


def check_targets(mask: Mask, T: int, S: int) -> None:
    """Raises InvalidInput if a sequence of T queries and S keys has fewer than the mask's targets."""
    if mask.targets > min(T, S):
        raise InvalidInput(
            f"mask {mask} over {T} queries and {S} keys; has more targets than these: the last {mask.targets} of both are targets"
        )


def materialise(mask: Mask, T: int, S: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Returns the mask as a boolean matrix (T, S), True where visible. For definitions and pictures only: no kernel builds it."""
    import torch

    i = torch.arange(T, device=device)[:, None] + (S - T)  # (T, 1)
    j = torch.arange(S, device=device)[None, :]  # (1, S)
    check_targets(mask, T, S)
    history, end = mask.over_history, S - mask.targets
    itself = (j == i) & (j >= end)
    i = i.clamp(max=end)
    return ((j >= history.first_key(i)) & (j <= history.last_key(i)) & (j < end)) | itself


def visible(mask: Mask, t: int, T: int, S: int) -> tuple[int, int]:
    """Returns the keys [start, stop) that query `t` sees; start == stop if none."""
    i = t + S - T
    start = max(mask.first_key(i), 0)
    return start, max(min(mask.last_key(i) + 1, S), start)


def key_range(mask: Mask, t_start: int, t_stop: int, T: int, S: int) -> tuple[int, int]:
    """Returns the smallest range [start, stop) with every key that a query in [t_start, t_stop) sees; empty if none."""
    if t_stop <= t_start:
        return 0, 0
    start = max(mask.first_key(t_start + S - T), 0)
    return start, max(min(mask.last_key(t_stop - 1 + S - T) + 1, S), start)


def query_range(mask: Mask, s_start: int, s_stop: int, T: int, S: int) -> tuple[int, int]:
    """Returns the smallest range [start, stop) with every query that sees a key in [s_start, s_stop); empty if none."""
    if s_stop <= s_start:
        return 0, 0
    start = max(mask.first_query(s_start) - (S - T), 0)
    return start, max(min(mask.last_query(s_stop - 1) - (S - T) + 1, T), start)


def sees_all(mask: Mask, t_start: int, t_stop: int, s_start: int, s_stop: int, T: int, S: int) -> bool:
    """Whether every query in [t_start, t_stop) sees every key in [s_start, s_stop): such a tile needs no mask."""
    return mask.first_key(t_stop - 1 + S - T) <= s_start and s_stop - 1 <= mask.last_key(t_start + S - T)


def pairs(mask: Mask, T: int, S: int) -> int:
    """Counts the visible (query, key) pairs. FLOPs are counted from them."""
    if mask.targets:
        check_targets(mask, T, S)
        n, history = mask.targets, mask.over_history
        start, stop = visible(history, 0, 0, S - n)
        return pairs(history, T - n, S - n) + n * (stop - start + 1)
    if mask.is_full or T == 0 or S == 0:
        return T * S
    import numpy as np

    i = np.arange(T, dtype=np.int64) + (S - T)
    low = np.maximum(mask.first_key(i), 0)
    high = np.minimum(mask.last_key(i), S - 1)
    return int(np.maximum(high - low + 1, 0).sum())


def draw(mask: Mask, T: int = 16, S: int = 16) -> str:
    """Returns the mask as text, one row per query: `#` visible, `.` hidden."""
    rows = []
    for t in range(T):
        seen = ["."] * S
        for start, stop in _runs(mask, t, T, S):
            seen[start:stop] = "#" * (stop - start)
        rows.append("".join(seen))
    return "\n".join(rows)


def _runs(mask: Mask, t: int, T: int, S: int) -> list[tuple[int, int]]:
    """The runs [start, stop) of keys that query `t` sees: one, and for a target also its own key."""
    check_targets(mask, T, S)
    n, history = mask.targets, mask.over_history
    # a query after the history sees what the first one after it would
    runs = [visible(history, min(t, T - n), T - n, S - n)]
    return runs if t < T - n else [*runs, (t + S - T, t + S - T + 1)]


def _bound(value: Any, word: str) -> int | None:
    """Checks a window's side. Returns None for no bound, and for a bound beyond every position."""
    side = None if value is None else whole(value)
    if value is not None and (side is None or side < 0):
        raise InvalidInput(f"{word} is {value!r}; must be an integer of at least 0, or None for no bound")
    # keeps sums of positions and bounds within the kernels' int32
    return side if side is not None and side < UNBOUNDED else None


def _size(value: Any, word: str, least: int) -> int:
    size = whole(value)
    if size is None or size < least:
        raise InvalidInput(f"{word} is {value!r}; must be an integer of at least {least}")
    return min(size, UNBOUNDED)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _max(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else a * (a >= b) + b * (b > a)


def _min(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else a * (a <= b) + b * (b < a)
