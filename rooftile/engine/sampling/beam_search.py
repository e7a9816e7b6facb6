"""Beam search: decides which successors of a request's beams go on, and which answers are complete.

Each step extends every beam by its most likely next tokens and keeps the best successors by the sum of their logprobs. A
successor that ends its text and is among the first `width` becomes a candidate for the answer, with the score

    sum of its logprobs / (its number of tokens)^length_penalty

The search is over when there are `width` candidates and the best beam, at its present length, scores no better than the worst of
them; with early_stopping it is over as soon as there are `width` candidates. Beams, scores and the end of the search are those
of `generate` in Transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Candidate(NamedTuple):
    """A complete answer: its score, the sum of its logprobs, and its tokens."""

    score: float
    logprob: float
    tokens: list[int]


class Successor(NamedTuple):
    """A beam that goes on: the index of its parent among the beams, and its next token."""

    parent: int
    token: int


class BeamSearch:
    """The search for one request.

    Args:
        width: the number of beams.
        limit: the most tokens that an answer may have.
        ends: the tokens that end an answer.
        least: the fewest tokens that an answer may have.
        length_penalty, early_stopping: see `SamplingParams`.
    """

    def __init__(
        self, width: int, limit: int, ends: frozenset[int], length_penalty: float, early_stopping: bool, *, least: int = 0
    ) -> None:
        self.width = width
        self.limit = limit
        self.ends = ends
        self.least = least
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.found: list[Candidate] = []
        """The candidates, best first."""
        self.over = False
        self.keep = max(2, 1 + len(ends)) * width
        """How many next tokens of each beam are looked at: enough for `width` beams to go on even if others end."""
        # all beams begin as the prompt, so the first step looks at one of them only
        self._sums = np.zeros(1, dtype=np.float32)
        self._tokens: list[list[int]] = [[]]

    def step(self, ids: list[list[int]], logprobs: list[list[float]]) -> list[Successor]:
        """Extends the beams by one token.

        Args:
            ids: for each beam its most likely next tokens, best first.
            logprobs: their logprobs.

        Returns:
            The beams that go on: `width` of them, or as many as there are successors; none if the search is over. The next step
            looks at as many beams.
        """
        beams = len(self._sums)
        # beams whose candidates come from different steps may have more of them than were asked for
        sums = np.array([row[: self.keep] for row in logprobs[:beams]], dtype=np.float32) + self._sums[:, None]
        best = np.argsort(-sums, axis=None, kind="stable")[: self.keep]
        length = len(self._tokens[0]) + 1
        ranked = []
        for beam, place in (divmod(int(n), sums.shape[1]) for n in best):
            allowed = length > self.least or ids[beam][place] not in self.ends
            if allowed and sums[beam, place] > -np.inf:
                ranked.append((sums[beam, place], Successor(beam, ids[beam][place])))
        full = len(self.found) == self.width
        going: list[tuple[np.float32, Successor]] = []
        for rank, (total, successor) in enumerate(ranked):
            complete = successor.token in self.ends or length == self.limit
            if not complete:
                going.append((total, successor))
            elif rank < self.width and not (full and self.early_stopping):
                tokens = [*self._tokens[successor.parent], successor.token]
                self.found.append(Candidate(float(total) / length**self.length_penalty, float(total), tokens))
        self.found = sorted(self.found, key=lambda candidate: -candidate.score)[: self.width]
        going = going[: self.width]
        self.over = not going or self._is_decided(going[0][0], length)
        if self.over:
            return []
        self._sums = np.array([total for total, _ in going], dtype=np.float32)
        self._tokens = [[*self._tokens[successor.parent], successor.token] for _, successor in going]
        return [successor for _, successor in going]

    def _is_decided(self, best: np.float32, length: int) -> bool:
        if len(self.found) < self.width:
            return False
        return self.early_stopping or float(best) / length**self.length_penalty <= self.found[-1].score
