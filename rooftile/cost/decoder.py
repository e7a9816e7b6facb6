"""The minimum cost of serving a decoder: bytes of weights, KV cache and states, and the FLOPs of prefill.

A step reads every weight once, but of experts only those that a token has chosen, and for each running answer the keys and values
of all its tokens so far; the states of recurrences it reads and writes. Prefill is compute-bound. Attention within prompts,
activations, sampling and the host are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.hardware.chips import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderCost:
    """The sizes of a model, its KV cache and its states."""

    weight_bytes: int  # read in every step
    token_bytes: int  # the keys and values of a token in all layers
    token_flops: int  # per prompt token in all layers, without attention
    state_bytes: int = 0  # a sequence's, in all layers
    expert_bytes: int = 0  # all routed experts', in all layers
    expert_share: float = 0.0  # what a token uses, of a layer's experts

    def touched_bytes(self, tokens: float) -> float:
        """Returns the expected bytes of the experts that a step of some tokens reads, if all are chosen alike."""
        return self.expert_bytes * (1 - (1 - self.expert_share) ** tokens)

    def bytes_moved(self, *, steps: int, cached: int, running: float) -> float:
        """Returns the bytes that steps read and write.

        Args:
            steps: their number.
            cached: the tokens of the cache that all answers read in all steps.
            running: the answers of a step, on average.
        """
        each = self.weight_bytes + self.touched_bytes(running) + 2 * running * self.state_bytes
        return steps * each + cached * self.token_bytes

    def seconds(self, rates: Rates, *, steps: int, cached: int, running: float, prompt: int = 0) -> float:
        """Returns the minimum time of `steps` steps that also prefill `prompt` tokens."""
        moved = self.bytes_moved(steps=steps, cached=cached, running=running)
        return moved / rates.bytes_per_s + prompt * self.token_flops / rates.flops_per_s


def tokens_read(prompt: int, generated: int) -> int:
    """Counts the tokens that one answer reads from the cache in all its steps. Its first token comes from the prefill."""
    steps = max(generated - 1, 0)
    return steps * prompt + steps * (steps + 1) // 2
