"""`Steering`: what decides on the host which tokens an answer may have next; and masks of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

# tokens that nothing has to look at: more than an answer has
ENDLESS = 1 << 40
Mask = npt.NDArray[np.int32]
"""One bit per token that may come next, in words of 32, the lowest first; no other bit is set."""


class Steering(Protocol):
    """The place of one answer in what it has to follow: a grammar, or a thought and then a grammar."""

    @property
    def mask(self) -> Mask:
        """The tokens that may come next: the same array while it has not changed, and `free_mask` while all may come."""
        ...

    @property
    def over(self) -> bool:
        """Whether nothing more is allowed, since the text is complete."""
        ...

    @property
    def free(self) -> int:
        """The number of next tokens for which `mask` holds, whatever these tokens are; they need not wait for one another."""
        ...

    def fork(self) -> Steering:
        """Returns the same place for another continuation."""
        ...

    def take(self, token: int) -> None:
        """Takes an answer's next token."""


class BothSteerings:
    """The place of one answer in two things that it follows at once.

    Args:
        first, second: some token is left to both.
        vocabulary: the number of the model's logits.
    """

    def __init__(self, first: Steering, second: Steering, vocabulary: int) -> None:
        self._first, self._second, self._vocabulary = first, second, vocabulary
        self._look()

    @property
    def over(self) -> bool:
        """Whether one of them allows nothing more."""
        return self._first.over or self._second.over

    def fork(self) -> BothSteerings:
        """Returns the same place for another continuation."""
        return BothSteerings(self._first.fork(), self._second.fork(), self._vocabulary)

    def take(self, token: int) -> None:
        """Takes an answer's next token."""
        self._first.take(token)
        self._second.take(token)
        self._look()

    def _look(self) -> None:
        first, second = self._first.mask, self._second.mask
        # one that leaves all free is one array, and the other's stays the same while it has not changed
        every = free_mask(self._vocabulary)
        self.mask = second if first is every else first if second is every else first & second
        self.free = min(self._first.free, self._second.free)


def mask_of(tokens: Iterable[int], vocabulary: int) -> Mask:
    """Returns the mask of some tokens.

    Example:
        >>> mask_of([0, 33], 40).tolist()
        [1, 2]
    """
    mask = np.zeros(-(-vocabulary // 32), dtype=np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
    return mask.view(np.int32)


def mask_without(tokens: Iterable[int], vocabulary: int) -> Mask:
    """Returns the mask of all tokens but some."""
    every = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
    if vocabulary % 32:
        every[-1] = (1 << vocabulary % 32) - 1
    return every & ~mask_of(tokens, vocabulary)


@lru_cache(maxsize=8)
def free_mask(vocabulary: int) -> Mask:
    """Returns the mask of all tokens: one array for each vocabulary, by which it is known."""
    found = mask_without((), vocabulary)
    found.setflags(write=False)
    return found


def allows(mask: Mask, token: int) -> bool:
    """Tells whether a mask has a token."""
    return bool(mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1)
