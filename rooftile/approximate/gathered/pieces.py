"""Pieces of the sequences of a step, so that the tensors of a choice have a size that does not grow with the step."""

from __future__ import annotations

from collections.abc import Iterator

# bytes that the largest tensors of a piece may take, unless a single sequence takes more
PIECE = 2**26


def in_pieces(sequences: int, each: int) -> Iterator[slice]:
    """Yields slices of sequences of `each` bytes: as many as take at most PIECE bytes, and at least one."""
    step = max(PIECE // max(each, 1), 1)
    for start in range(0, sequences, step):
        yield slice(start, min(start + step, sequences))
