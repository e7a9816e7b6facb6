"""Requests of every kind that an engine answers, so that a test can look at what each of them makes the engine do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams

USUAL = {"temperature": 0.7, "max_tokens": 3, "ignore_eos": True}
# lengths on both sides of a block of 16, of the queries from which prompts have kernels of their own, and of tiles
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 113, 128, 129, 257, 600)


def requests(llm: LLM, *, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields a name and a call for each kind of request. The model has at least 64 tokens."""
    rng, vocabulary = random.Random(seed), llm.engine.runner.decoder.config.vocab_size
    budget, most = llm.engine.scheduler.max_batched_tokens, llm.engine.max_answers

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(length)]

    def ask(prompts: list[list[int]], **options: Any) -> Callable[[], Any]:
        return lambda: llm.generate(prompts, SamplingParams(**USUAL | options))

    for length in lengths:
        known = prompt(length)
        yield f"prompt of {length}", ask([known])
        yield f"the same {length} again, in the prefix cache", ask([known])
        yield f"{length} in the prefix cache and 30 more", ask([known + prompt(30)])
        yield f"{length} in the prefix cache and one more", ask([[*known, 1]])
    yield "prompt in several steps", ask([prompt(min(2 * budget + 7, llm.engine.max_len - 4))])
    for count in sorted({*range(1, min(most, 18) + 1), most // 2 or 1, max(most - 1, 1), most}):
        yield f"{count} at once", ask([prompt(rng.choice((3, 7, 20, 60))) for _ in range(count)])
    yield "more than run at once", ask([prompt(9) for _ in range(most + 3)])
    several = min(4, most)
    yield "samples of one prompt", ask([prompt(21)], n=several, max_tokens=20)
    yield "samples of a cached prompt", ask([prompt(64)], n=several)
    yield "beams", ask([prompt(40)], beam_width=several, n=min(2, several), temperature=1.0)
    yield "greedy", ask([prompt(20)], temperature=0.0)
    yield "logprobs", ask([prompt(50), prompt(5)], logprobs=3, prompt_logprobs=2)
    yield "end tokens that are banned", ask([prompt(50)], min_tokens=2)
    yield from combinations(ask, prompt)


def combinations(
    ask: Callable[..., Callable[[], Any]], prompt: Callable[[int], list[int]]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields a request for every set of the sampler's features that one request can ask for without a tokenizer."""
    options: dict[str, dict[str, Any]] = {
        "truncation": {"top_k": 5, "top_p": 0.9}, "penalties": {"presence_penalty": 0.5}, "bias": {"logit_bias": {3: 2.0}},
    }  # fmt: skip
    for bits in range(1, 1 << len(options)):
        names = [name for n, name in enumerate(options) if bits >> n & 1]
        for rows in (1, 3):
            asked: dict[str, Any] = {}
            for name in names:
                asked |= options[name]
            yield f"{' and '.join(names)}, {rows} rows", ask([prompt(20) for _ in range(rows)], **asked)
    yield "allowed tokens", ask([prompt(20)], allowed_token_ids=[3, 5])
