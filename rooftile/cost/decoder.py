"""The least that serving a decoder asks of a machine: bytes of weights and cache, and the products of the prompts.

A step reads every weight once, and for each running answer the keys and values of all its tokens so far. A prompt is
bound by its matrix products. Attention within prompts, activations, sampling and the host count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.hardware.chips import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderCost:
    """Sizes of a model and its cache."""

    weight_bytes: int  # read in every step
    token_bytes: int  # the keys and values of a token in all layers
    token_flops: int  # of one token of a prompt in all layers, without attention

    def bytes_read(self, *, steps: int, cached: int) -> int:
        """Bytes that so many steps read, whose answers read `cached` tokens of the cache in all."""
        return steps * self.weight_bytes + cached * self.token_bytes

    def seconds(self, rates: Rates, *, steps: int, cached: int, prompt: int = 0) -> float:
        """The least time of so many steps that also read `prompt` tokens of prompts."""
        read = self.bytes_read(steps=steps, cached=cached)
        return read / rates.bytes_per_s + prompt * self.token_flops / rates.flops_per_s


def tokens_read(prompt: int, generated: int) -> int:
    """Tokens that one answer reads from the cache, all its steps together. Its first token comes with the prompt."""
    steps = max(generated - 1, 0)
    return steps * prompt + steps * (steps + 1) // 2
