"""`Forecast`: how many drafted tokens of each answer pay in a batch, by the bytes and FLOPs of a step.

With B answers of which each reads its last token and d drafted ones, a step takes at least

    T(d) = max(bytes / bandwidth, B (1 + d) FLOPs of a token / FLOP/s)

Its bytes are those of the weights, which are read once, and of the cache, which each of the B (1 + d) rows reads anew. Where a
drafted token is accepted with probability a, after all before it, an answer gets E(d) = 1 + a + ... + a^d tokens. Drafts pay
where E(d) T(0) / T(d) is at least LEAST: a step with drafts is not launched before the last one's tokens have reached the host.
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
# FLOPs that a processor without a datasheet computes while it reads a byte
PER_BYTE = 16.0
# the matrix units' words for what a model computes in
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Forecast:
    """Predicts whether drafts pay.

    Args:
        cost: the bytes and FLOPs of the model's steps.
        rates: the machine's.
    """

    def __init__(self, cost: DecoderCost, rates: Rates) -> None:
        self.cost, self.rates = cost, rates
        self.accepted = EXPECTED
        """The share of the drafted tokens that are accepted, of late."""

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
        alone, best, found = self.seconds(answers, cached), LEAST, 0
        for count in sorted({1, 3, 7, 15, tokens}):
            if count <= tokens:
                got = sum(self.accepted**n for n in range(count + 1))
                gain = got * alone / self.seconds(answers * (1 + count), cached * (1 + count))
                if gain > best:
                    best, found = gain, count
        return found

    def seconds(self, rows: int, cached: int) -> float:
        """Returns the least time of a step that reads `rows` tokens, and `cached` tokens of the cache for them."""
        moved = self.cost.weight_bytes + self.cost.touched_bytes(rows) + cached * self.cost.token_bytes
        return max(moved / self.rates.bytes_per_s, rows * self.cost.token_flops / self.rates.flops_per_s)


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Returns a device's rates by its datasheet, or where there is none, rates whose ratio is usual."""
    chip = chip_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return Rates(PER_BYTE, 1.0) if chip is None else chip.rates(WORDS.get(dtype, "fp32"))
