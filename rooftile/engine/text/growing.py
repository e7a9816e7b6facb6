"""`GrowingText`: a text that only grows, of which a snapshot costs the same however long the text is."""

from __future__ import annotations

from typing import NamedTuple

# number of pieces that are joined into one: a snapshot is read with few joins, and every character is joined once before
PIECES = 64


class TextSnapshot(NamedTuple):
    """A text as it was at one moment. Its lists are shared with a `GrowingText`, which only appends to them."""

    joined: list[str]
    joined_count: int
    pieces: list[str]
    piece_count: int

    def read(self) -> str:
        """Returns the text."""
        return "".join(self.joined[: self.joined_count] + self.pieces[: self.piece_count])

    def after(self, earlier: TextSnapshot | None) -> str:
        """Returns what has come since an earlier snapshot of the same text; all of it without one."""
        if earlier is None:
            return self.read()
        if earlier.joined_count == self.joined_count:
            return "".join(self.pieces[earlier.piece_count : self.piece_count])
        # the earlier snapshot's pieces begin the first text that was joined since
        had = sum(map(len, earlier.pieces[: earlier.piece_count]))
        return "".join(self.joined[earlier.joined_count : self.joined_count] + self.pieces[: self.piece_count])[had:]


class GrowingText:
    """A text that grows piece by piece. One thread appends; snapshots may be read in any thread."""

    __slots__ = ("_fresh", "_joined", "_pieces")

    def __init__(self) -> None:
        self._joined: list[str] = []
        self._pieces: list[str] = []
        # pieces that `take` has not returned; None if no caller takes them
        self._fresh: list[str] | None = None

    def follow(self) -> None:
        """Keeps what is appended from now on until `take` asks for it."""
        self._fresh = []

    def take(self) -> str:
        """Returns the text appended since `follow` or the last `take`; without `follow`, the whole text."""
        if self._fresh is None:
            self._fresh = [self.snapshot().read()]
        text = "".join(self._fresh)
        self._fresh.clear()
        return text

    def append(self, piece: str) -> None:
        """Adds a piece at the end."""
        if not piece:
            return
        if self._fresh is not None:
            self._fresh.append(piece)
        self._pieces.append(piece)
        if len(self._pieces) == PIECES:
            self._joined.append("".join(self._pieces))
            # a new list: snapshots go on reading the old one
            self._pieces = []

    def snapshot(self) -> TextSnapshot:
        """Returns the text of this moment without copying it."""
        return TextSnapshot(self._joined, len(self._joined), self._pieces, len(self._pieces))
