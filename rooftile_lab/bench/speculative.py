"""How fast an engine answers with drafts, by batch and by how likely a drafted token is accepted.

Random weights write no text that a look-up would find. So a bias makes one token the likeliest everywhere: the greedy answer is
that token alone, while a step computes all that it computes for a text. The guesses are made here: each of their tokens is that
token with the probability that is asked for, and else another. Everything behind the guess is the engine's: rows, graphs, draws,
the choice of lengths, and whether there are drafts at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from time import perf_counter
from typing import NamedTuple

import torch

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.models import Decoder

TOKEN, OTHER = 5, 6
MEASURES = ("output_tok_s", "tokens_per_step", "drafted", "accepted_share")


class SpeculativeSizes(NamedTuple):
    """The sizes of the runs."""

    prompt: int
    answer: int
    batches: tuple[int, ...] = (1, 16, 256)
    accepted: tuple[float, ...] = (0.5, 0.8, 1.0)


class SpeculativeRun(NamedTuple):
    """The time of a run, and what became of its drafts."""

    seconds: float
    output_tok_s: float
    tokens_per_step: float  # each answer's
    drafted: int
    accepted_share: float


class Guesses:
    """Guesses that are right with a probability; see `rooftile.engine.speculation.ngrams.Guesser`."""

    right = 1.0

    def __init__(self, shortest: int, longest: int) -> None:
        self._random = Random(0)

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        return [TOKEN if self._random.random() < self.right else OTHER for _ in range(count)]


def sizes_for(scale: float) -> SpeculativeSizes:
    """Returns the sizes for a scale: at 1 prompts of 1,000 tokens and answers of 256."""
    return SpeculativeSizes(max(8, round(1000 * scale)), max(16, round(256 * scale)))


def engine_for(decoder: Decoder, sizes: SpeculativeSizes) -> LLM:
    """Returns an engine with drafts where they pay."""
    most = max(sizes.batches)
    return LLM(
        decoder, speculative="lookup", max_model_len=sizes.prompt + sizes.answer + 16, max_num_seqs=most,
        num_blocks=None if decoder.embedding.is_cuda else most * (sizes.prompt + sizes.answer + 32) // 16,
        enable_prefix_caching=False,
    )  # fmt: skip


def run(llm: LLM, sizes: SpeculativeSizes, batch: int, accepted: float | None) -> SpeculativeRun:
    """Answers a batch of requests; the time is that after the first token of the last one.

    Args:
        llm: the engine.
        sizes: how long prompts and answers are.
        batch: how many requests.
        accepted: how likely a drafted token is accepted; None for no drafts.
    """
    engine = llm.engine
    assert engine.speculator is not None
    guesses = type("Guesses", (Guesses,), {"right": accepted})
    engine.speculator.guesser = guesses
    vocabulary, random = engine.runner.decoder.config.vocab_size, Random(1)
    params = SamplingParams(
        temperature=0, max_tokens=sizes.answer, ignore_eos=True, logit_bias={TOKEN: 100.0}, speculative=accepted is not None
    )
    prompts = [[random.randrange(vocabulary) for _ in range(sizes.prompt)] for _ in range(batch)]
    requests = [engine.add(prompt, params) for prompt in prompts]
    while not all(request.answers[0].generated for request in requests):
        engine.step()
    if llm.pages.storage.is_cuda:
        torch.cuda.synchronize()
    before, counts = sum(request.answers[0].generated for request in requests), engine.speculator.counts.copy()
    steps, began = engine.steps["steps"], perf_counter()
    while not engine.idle:
        engine.step()
    seconds = perf_counter() - began
    tokens = sum(request.answers[0].generated for request in requests) - before
    assert all(token == TOKEN for request in requests for token in request.answers[0].ids[sizes.prompt :])
    now = engine.speculator.counts - counts
    return SpeculativeRun(
        seconds, tokens / seconds, tokens / batch / max(1, engine.steps["steps"] - steps), now["drafted"],
        now["accepted"] / max(1, now["drafted"]),
    )  # fmt: skip
