"""Associative recall: a text gives pairs of a key and a value, and asks for the values of keys that it gave before.

    k3v1  k7v4  k3?  k1v4  k7?  k3?  ...

A pair is one token and so is a question. So the task needs one step of attention, from a question to its pair, and measures how
many pairs a method can hold and find. With two tokens per pair a layer must first learn to look at the token before, which takes
most of a short training. Pairs stand at random places, and a question asks for any pair before it with equal chance, so distances
cover the text. The text never shows an answer, so a method that sees later tokens learns nothing from them. The task is a variant
of multi-query associative recall: Arora et al., Zoology, arXiv:2312.04927.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput

# a place where nothing is asked, as torch's cross_entropy leaves out
NOTHING = -100


class Batch(NamedTuple):
    """Texts and what they ask."""

    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64: the value's token at a question, NOTHING elsewhere
    distances: Tensor  # (B, T) int64: from a question back to its pair; 0 elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """The task in its sizes. Token ids are the values, then a question for each key, then all pairs of a key and a value.

    Args:
        length: tokens per text.
        pairs: the numbers of pairs; a batch has equally many texts of each.
        keys, values: how many different ones there are. A text gives a key once, and a value as often as chance has it.

    Raises:
        InvalidInput: the pairs do not fit into a text, or there are fewer keys than pairs.
    """

    length: int
    pairs: tuple[int, ...]
    keys: int
    values: int

    def __post_init__(self) -> None:
        if not self.pairs or min(self.pairs) < 1:
            raise InvalidInput(f"pairs is {self.pairs}; must be numbers of at least 1")
        most = max(self.pairs)
        if most >= self.length:
            raise InvalidInput(f"pairs go up to {most} and length is {self.length}; a text must have room for a question too")
        if most > self.keys or self.values < 2:
            counts = f"keys is {self.keys} and values {self.values}"
            raise InvalidInput(f"{counts}; must be at least {most}, the most pairs, and 2")

    @property
    def vocab_size(self) -> int:
        return self.values + self.keys + self.keys * self.values

    @property
    def chance(self) -> float:
        """The recall of a model that knows which tokens are values, and nothing else."""
        return 1 / self.values

    def draw(self, batch: int, generator: torch.Generator) -> Batch:
        """Texts with each number of pairs, batch / len(pairs) of each, at least one."""
        each = max(batch // len(self.pairs), 1)
        drawn = [self.draw_with(pairs, each, generator) for pairs in self.pairs]
        return Batch(*(torch.cat(parts) for parts in zip(*drawn, strict=True)))

    def draw_with(self, pairs: int, batch: int, generator: torch.Generator) -> Batch:
        """Texts with one number of pairs, on the generator's device."""
        made: dict[str, Any] = {"device": generator.device, "generator": generator}
        keys = torch.rand(batch, self.keys, **made).argsort(dim=1)[:, :pairs]
        values = torch.randint(self.values, (batch, pairs), **made)
        # the first token is a pair, so that there is something to ask for
        places = torch.rand(batch, self.length - 1, **made).argsort(dim=1)[:, : pairs - 1] + 1
        places = torch.nn.functional.pad(places, (1, 0)).sort(dim=1).values  # (B, pairs)
        is_pair = torch.zeros(batch, self.length, dtype=torch.bool, device=generator.device).scatter_(1, places, True)
        given = is_pair.cumsum(dim=1)  # (B, T): pairs so far
        asked = (torch.rand(batch, self.length, **made) * given).long().clamp(max=pairs - 1)
        # a pair asks for itself, and the answer is left out
        asked = torch.where(is_pair, given - 1, asked)
        key, value = keys.gather(1, asked), values.gather(1, asked)
        tokens = torch.where(is_pair, self.pair(key, value), self.question(key))
        distances = torch.arange(self.length, device=generator.device) - places.gather(1, asked)
        return Batch(tokens, value.masked_fill(is_pair, NOTHING), distances)

    def question(self, key: Tensor) -> Tensor:
        """The tokens that ask for keys."""
        return self.values + key

    def pair(self, key: Tensor, value: Tensor) -> Tensor:
        """The tokens of pairs."""
        return self.values + self.keys + key * self.values + value

    def with_needle(self, depth: float, batch: int, generator: torch.Generator) -> Batch:
        """Texts with the most pairs whose last token, and no other, asks for the pair nearest to a depth from 0 to 1."""
        tokens, _, _ = self.draw_with(max(self.pairs), batch, generator)
        first_pair = self.values + self.keys
        place = torch.arange(self.length, device=tokens.device)
        away = (place - depth * (self.length - 1)).abs().masked_fill(tokens < first_pair, torch.inf)
        away[:, -1] = torch.inf  # the question overwrites it
        needle = away.argmin(dim=1, keepdim=True)  # (B, 1)
        pair = tokens.gather(1, needle) - first_pair
        tokens[:, -1:] = self.question(pair // self.values)
        targets = torch.full_like(tokens, NOTHING)
        targets[:, -1:] = pair % self.values
        distances = torch.zeros_like(tokens)
        distances[:, -1:] = self.length - 1 - needle
        return Batch(tokens, targets, distances)

    def buckets(self) -> list[int]:
        """The upper ends of ranges of distances: powers of two, and the length."""
        return [*(2**n for n in range(2, 64) if 2**n < self.length), self.length]


def right(logits: Tensor, batch: Batch) -> Tensor:
    """Whether each question, in the order of the texts, is answered rightly: bool (questions,)."""
    asked = batch.targets != NOTHING
    return logits.argmax(-1)[asked] == batch.targets[asked]


def by_distance(rights: Tensor, distances: Tensor, ends: Sequence[int]) -> dict[int, float]:
    """The share of right answers by distance: by the upper end of each range that has a question."""
    place = torch.bucketize(distances, torch.tensor(list(ends), device=distances.device))
    counts = torch.bincount(place, minlength=len(ends)).tolist()
    sums = torch.bincount(place, weights=rights.float(), minlength=len(ends)).tolist()
    return {end: right / count for end, right, count in zip(ends, sums, counts, strict=False) if count}
