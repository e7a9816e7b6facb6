"""How fast an engine answers with drafts, by batch and by how likely a drafted token is accepted.

Random weights write no text that a look-up would find. So a bias makes one token the likeliest everywhere: the greedy answer is
that token alone, while a step computes all that it computes for a text. The guesses are made here: each of their tokens is that
token with the probability that is asked for, and else another. Everything behind the guess is the engine's: rows, graphs, draws,
the choice of lengths, and whether there are drafts at all.

Or guesses are right where a look-up's are in a text that repeats its prompt (see `lookup_texts`).

A draft model with random weights would not guess what the larger one draws. It reads, draws and hands its tokens over as in any
engine, which takes its time; then its tokens are replaced by guesses as above. So the speed is measured, and the share that is
accepted is set: a trained pair is as fast as the row with its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from time import perf_counter
from typing import NamedTuple

import torch

from rooftile.engine.llm import LLM
from rooftile.engine.requests.request import Answer
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.speculation.drafter import Drafter
from rooftile.engine.speculation.speculator import Speculator
from rooftile.models import Decoder, ModelConfig
from rooftile_lab.bench.lookup_texts import TEXTS, LookupText, TextGuesser
from rooftile_lab.bench.models import MODELS

TOKEN, OTHER = 5, 6
# how likely a drafted token is accepted, or a text whose look-ups say it; None for no drafts
Guessed = float | LookupText | None
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


class ReplacedGuesses:
    """A draft model that computes its guesses, and then has others in their place, which are right with a probability."""

    def __init__(self, model: Drafter, right: float) -> None:
        self.model, self.right = model, right
        self._random = Random(0)

    def can(self, answer: Answer, count: int) -> bool:
        return self.model.can(answer, count)

    def guess(
        self, asked: Sequence[tuple[Answer, int]], entries: Mapping[tuple[int, int], int]
    ) -> dict[Answer, list[int]]:  # fmt: skip
        found = self.model.guess(asked, entries)
        return {
            answer: [TOKEN if self._random.random() < self.right else OTHER for _ in tokens] for answer, tokens in found.items()
        }

    def note(self, answer: Answer, drafted: int, accepted: int) -> None:
        self.model.note(answer, drafted, accepted)


def sizes_for(scale: float, *, draft: bool = False) -> SpeculativeSizes:
    """Returns the sizes for a scale: at 1 prompts of 1,000 tokens and answers of 256. `draft`: those for a draft model."""
    sizes = SpeculativeSizes(max(8, round(1000 * scale)), max(16, round(256 * scale)))
    return sizes._replace(batches=(1, 256), accepted=(0.6, 0.8, 0.9)) if draft else sizes


def ways(sizes: SpeculativeSizes, *, draft: bool) -> dict[str, Guessed]:
    """Returns what is guessed in the runs, by name: nothing first."""
    shares = {f"a{share:.2f}": share for share in sizes.accepted}
    return {"none": None, **shares, **({} if draft else {name: text() for name, text in TEXTS.items()})}


def draft_for(config: ModelConfig) -> ModelConfig:
    """Returns the shape of a draft model: Llama's 1B for its 8B; for others a quarter of their layers, and of their width."""
    if config == MODELS["8b"]:
        return MODELS["1b"]
    layers = max(1, config.layers // 4)
    cut = {name: getattr(config, name)[:layers] for name in ("windows", "mixers", "feed_forwards")}
    sizes = {name: max(1, getattr(config, name) // 4) for name in ("hidden", "heads", "kv_heads", "ffn")}
    return replace(config, layers=layers, unrotated=tuple(n for n in config.unrotated if n < layers), **sizes, **cut)


def engine_for(decoder: Decoder, sizes: SpeculativeSizes, draft: ModelConfig | None = None) -> LLM:
    """Returns an engine with drafts where they pay, by look-up or by a model of some shape with random weights."""
    most = max(sizes.batches)
    return LLM(
        decoder, speculative="lookup" if draft is None else {"model": draft},
        max_model_len=sizes.prompt + sizes.answer + 16, max_num_seqs=most,
        num_blocks=None if decoder.embedding.is_cuda else most * (sizes.prompt + sizes.answer + 32) // 16,
        enable_prefix_caching=False,
    )  # fmt: skip


def run(llm: LLM, sizes: SpeculativeSizes, batch: int, guessed: Guessed) -> SpeculativeRun:
    """Answers a batch of requests; the time is that after the first token of the last one.

    Args:
        llm: the engine.
        sizes: how long prompts and answers are.
        batch: how many requests.
        guessed: what is guessed.
    """
    engine = llm.engine
    assert engine.speculator is not None
    _set_guesses(engine.speculator, sizes, guessed)
    vocabulary, random = engine.runner.decoder.config.vocab_size, Random(1)
    params = SamplingParams(
        temperature=0, max_tokens=sizes.answer, ignore_eos=True, logit_bias={TOKEN: 100.0}, speculative=guessed is not None
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


def _set_guesses(speculator: Speculator, sizes: SpeculativeSizes, guessed: Guessed) -> None:
    """Has guesses be right as often as is asked for."""
    drafter = speculator.drafter
    if isinstance(guessed, LookupText):
        words = {"text": guessed, "given": sizes.prompt, "right": TOKEN, "wrong": OTHER}
        speculator.guesser = type("TextGuesses", (TextGuesser,), words)
    elif drafter is None:
        speculator.guesser = type("Guesses", (Guesses,), {"right": guessed})
    elif guessed is not None:
        speculator.drafter = ReplacedGuesses(drafter.model if isinstance(drafter, ReplacedGuesses) else drafter, guessed)
