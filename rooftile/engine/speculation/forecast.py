"""`Forecast`: how many drafted tokens of each answer pay in a batch, by the bytes and FLOPs of a step.

With B answers of which each reads its last token and d drafted ones, a step takes at least

    T(d) = max(bytes / bandwidth, B (1 + d) FLOPs of a token / FLOP/s)

Its bytes are those of the weights, which are read once, and of the cache, which each of the B (1 + d) rows reads anew. Where a
drafted token is accepted with probability a, after all before it, an answer gets E(d) = 1 + a + ... + a^d tokens. Drafts pay
where E(d) T(0) / T(d) is at least LEAST: a step with drafts is not launched before the last one's tokens have reached the host.
A draft model adds to T(d) the time of d of its own steps, each of which reads B tokens.
"""

from __future__ import annotations

import torch

from rooftile.cost.decoder import DecoderCost
from rooftile.hardware.chips import Rates, chip_named

# what a step with drafts has to gain
LEAST = 1.2
# how likely a drafted token is taken to be accepted before the first was, and at least: drafts that are bad end by their pace
EXPECTED, LEAST_EXPECTED = 0.7, 0.5
# a new draft's weight in the share that was accepted
NEWEST = 0.05
# the lengths that are tried: guesses of look-up cost a step's rows, which graphs have in powers of two
LENGTHS = (1, 3, 7, 15)
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25)
# FLOPs that a processor without a datasheet computes while it reads a byte
PER_BYTE = 16.0
# the matrix units' words for what a model computes in
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Forecast:
    """Predicts whether drafts pay.

    Args:
        cost: the bytes and FLOPs of the model's steps.
        rates: the machine's.
        draft: the bytes and FLOPs of a draft model's steps; None without one.
    """

    def __init__(self, cost: DecoderCost, rates: Rates, draft: DecoderCost | None = None) -> None:
        self.cost, self.rates, self.draft = cost, rates, draft
        self.accepted = EXPECTED
        """The share of the drafted tokens that are accepted, of late."""

    def forget(self) -> None:
        """Forgets the drafts so far."""
        self.accepted = EXPECTED

    def note(self, drafted: int, accepted: int) -> None:
        """Takes notice of a draft, and of how many of its tokens were accepted."""
        # tokens behind the first that was refused say nothing
        tried = min(accepted + 1, drafted)
        self.accepted += min(NEWEST * tried, 1.0) * (accepted / tried - self.accepted)
        self.accepted = min(max(self.accepted, LEAST_EXPECTED), 0.99)

    def most(self, answers: int, cached: int, tokens: int) -> int:
        """Returns how many tokens at most are drafted for each answer; 0 where drafts do not pay.

        Args:
            answers: how many answers run.
            cached: the tokens that they have in the cache together.
            tokens: the most tokens of a draft.
        """
        best, found = LEAST, 0
        for count in sorted({*(LENGTHS if self.draft is None else DRAFT_LENGTHS), tokens}):
            if count <= tokens and (gain := self.gain(answers, cached, count)) > best:
                best, found = gain, count
        return found

    def gain(self, answers: int, cached: int, count: int) -> float:
        """Returns how many times as many tokens come in a second, at least, with drafts of `count` tokens as without."""
        got = sum(self.accepted**n for n in range(count + 1))
        alone, together = self.seconds(answers, cached), self.seconds(answers * (1 + count), cached * (1 + count))
        if self.draft is not None:
            together += count * self._seconds(self.draft, answers, cached)
        return got * alone / together

    def seconds(self, rows: int, cached: int) -> float:
        """Returns the least time of a step that reads `rows` tokens, and `cached` tokens of the cache for them."""
        return self._seconds(self.cost, rows, cached)

    def _seconds(self, cost: DecoderCost, rows: int, cached: int) -> float:
        moved = cost.weight_bytes + cost.touched_bytes(rows) + cached * cost.token_bytes
        return max(moved / self.rates.bytes_per_s, rows * cost.token_flops / self.rates.flops_per_s)


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Returns a device's rates by its datasheet, or where there is none, rates whose ratio is usual."""
    chip = chip_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Rates(PER_BYTE, 1.0) if chip is None else chip.rates(WORDS.get(dtype, "fp32"))
