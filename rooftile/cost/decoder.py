"""The minimum cost of serving a decoder: bytes of weights and KV cache, and the FLOPs of prefill.

A step reads every weight once, and for each running answer the keys and values of all its tokens so far. Prefill is
compute-bound. Attention within prompts, activations, sampling and the host are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.hardware.chips import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderCost:
    """The sizes of a model and its KV cache."""

    weight_bytes: int  # read in every step
    token_bytes: int  # the keys and values of a token in all layers
    token_flops: int  # per prompt token in all layers, without attention

    def bytes_read(self, *, steps: int, cached: int) -> int:
        """Returns the bytes that `steps` steps read, whose answers read `cached` tokens of the cache in total."""
        return steps * self.weight_bytes + cached * self.token_bytes

    def seconds(self, rates: Rates, *, steps: int, cached: int, prompt: int = 0) -> float:
        """Returns the minimum time of `steps` steps that also prefill `prompt` tokens."""
        read = self.bytes_read(steps=steps, cached=cached)
        return read / rates.bytes_per_s + prompt * self.token_flops / rates.flops_per_s


def tokens_read(prompt: int, generated: int) -> int:
    """Counts the tokens that one answer reads from the cache in all its steps. Its first token comes from the prefill."""
    steps = max(generated - 1, 0)
    return steps * prompt + steps * (steps + 1) // 2
