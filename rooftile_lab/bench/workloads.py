"""The workloads of serving benchmarks: requests as data, the same on every machine.

    W1      256 requests at once, prompts and answers of 100 to 1,024 tokens, as small engines publish it
    W2      lengths like ShareGPT's conversations
    W3      lengths like Alpaca's instructions
    W4-p    64 questions after the same p tokens
    W5-..   several samples, or beams, for each prompt of W3 and W2
    W6      conversations of five turns
    W7      long prompts
    W8      W2 in a cache of 15.7k slots, paged against reserved: the setting of the paper's comparison
    W9      clients that disconnect, and invalid requests
    W10     one request alone
    W11     four samples for each of W1's first 64 prompts

Lengths of W2 to W6 are drawn from log-normal distributions with the means that the paper gives for its data sets; the spreads
are ours. Kwon et al., PagedAttention, arXiv:2309.06180, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

from rooftile.diagnosis.programs.decode_step import IDS
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput

LONGEST = 1024
"""The most tokens of a prompt, and of an answer, in W1 to W6 and W8."""
SLOTS = 15_700
"""Slots of the cache in the paper's comparison: 12 GB for OPT-13B."""


class WorkloadRequest(NamedTuple):
    """A request as a client makes it."""

    prompt: list[int]
    params: SamplingParams
    at: float = 0.0
    """Seconds after the start; or, with `after`, after that answer."""
    after: int | None = None
    """The request whose conversation this one continues: that prompt and its answer come before this prompt."""
    gone: int | None = None
    """The number of tokens of the answer after which the client disconnects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, with the settings of the engine that they are meant for.

    Args:
        name: the workload's name.
        purpose: what it measures.
        requests: in the order of their arrival, for those without `after`.
        cut: the next prompt of a conversation is its last `cut` tokens.
        settings: arguments of `LLM` that belong to the workload.
        allocators: the allocators that are compared.
    """

    name: str
    purpose: str
    requests: tuple[WorkloadRequest, ...]
    cut: int = LONGEST
    settings: dict[str, Any] = field(default_factory=dict)
    allocators: tuple[str, ...] = ("paged",)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((len(ask.prompt) if ask.after is None else self.cut) + (ask.params.max_tokens or 0) for ask in self.requests)


class Lengths(NamedTuple):
    """Log-normal lengths of prompts and answers: their means before the cut at LONGEST, and sigmas."""

    prompt: float
    answer: float
    prompt_sigma: float
    answer_sigma: float

    def draw(self, rng: Random) -> tuple[int, int]:
        """The lengths of one request."""
        return _log_normal(rng, self.prompt, self.prompt_sigma), _log_normal(rng, self.answer, self.answer_sigma)


SHAREGPT = Lengths(161.31, 337.99, 1.2, 0.9)
ALPACA = Lengths(19.31, 58.45, 0.6, 0.9)


class Scale(NamedTuple):
    """The share of requests and of their lengths, for smaller machines."""

    factor: float = 1.0

    def __call__(self, number: int) -> int:
        return max(1, round(number * self.factor))


def uniform(scale: Scale) -> Workload:
    """W1: uniform lengths."""
    rng = Random(0)
    # in this order, and with these bounds, as in the benchmark that others publish: 133,966 tokens of answers
    prompts = _uniform_prompts(rng, 256)
    limits = [rng.randint(100, LONGEST) for _ in range(256)]
    asked = zip(prompts[: scale(256)], limits[: scale(256)], strict=True)
    requests = tuple(WorkloadRequest(ids[: scale(len(ids))], _sampled(scale(limit), temperature=0.6)) for ids, limit in asked)
    return Workload(name="W1", purpose="uniform lengths: numbers that others publish", requests=requests)


def like(name: str, purpose: str, lengths: Lengths, scale: Scale, *, count: int = 1000, **asked: Any) -> Workload:
    """W2, W3 and W5: requests of these lengths, all at once; `asked` is for SamplingParams."""
    return Workload(name=name, purpose=purpose, requests=tuple(_drawn(lengths, scale, scale(count), **asked)))


def shared_prefix(prefix: int, scale: Scale) -> Workload:
    """W4: a shared prefix."""
    before = _ids(Random(1), scale(prefix))
    requests = [ask._replace(prompt=before + ask.prompt) for ask in _drawn(ALPACA, scale, scale(64))]
    return Workload(name=f"W4-{prefix}", purpose=f"{prefix:,} tokens that all begin with", requests=tuple(requests))


def chat(scale: Scale) -> Workload:
    """W6: a turn comes when the turn before is answered, and begins with the conversation so far."""
    conversations, turns = scale(64), 5
    asked = _drawn(SHAREGPT, scale, conversations * turns)
    requests = [ask._replace(after=n - conversations if n >= conversations else None) for n, ask in enumerate(asked)]
    return Workload(name="W6", purpose="conversations of 5 turns", requests=tuple(requests), cut=scale(LONGEST))


def long_prompts(scale: Scale) -> Workload:
    """W7: long prompts."""
    rng = Random(0)
    requests = tuple(WorkloadRequest(_ids(rng, scale(32_768)), _sampled(scale(256))) for _ in range(scale(32)))
    return Workload(name="W7", purpose="long prompts", requests=requests)


def little_memory(scale: Scale, *, block: int = 16) -> Workload:
    """W8: a small cache, paged against reserved."""
    requests = tuple(_drawn(SHAREGPT, scale, scale(1000)))
    length = scale(2 * LONGEST)
    # room for one at least, also where nothing but lengths is left to shrink
    blocks = max(scale(SLOTS) // block, -(-length // block))
    return Workload(
        name="W8", purpose="15.7k slots of cache: paged against reserved", requests=requests,
        settings={"num_blocks": blocks, "block_size": block, "max_model_len": length}, allocators=("paged", "contiguous"),
    )  # fmt: skip


def disturbed(scale: Scale) -> Workload:
    """W9: a fifth of the clients disconnects, and one request in a hundred (at least one) is invalid."""
    requests = list(_drawn(SHAREGPT, scale, scale(1000)))
    rng = Random(2)
    for n in rng.sample(range(len(requests)), len(requests) // 5):
        requests[n] = requests[n]._replace(gone=rng.randrange(requests[n].params.max_tokens or 1))
    wrong: tuple[list[int], ...] = ([], [-1], [1 << 40])
    for n in rng.sample(range(len(requests)), max(1, len(requests) // 100)):
        requests[n] = requests[n]._replace(prompt=rng.choice(wrong), gone=None)
    return Workload(name="W9", purpose="clients that go away, invalid requests", requests=tuple(requests))


def alone(scale: Scale) -> Workload:
    """W10: one request."""
    request = WorkloadRequest(_ids(Random(0), scale(128)), _sampled(scale(512)))
    return Workload(name="W10", purpose="one request alone: the floor of latency", requests=(request,))


def samples(scale: Scale) -> Workload:
    """W11: four samples per prompt."""
    asked = _sampled(scale(128), n=4, temperature=0.6)
    requests = tuple(WorkloadRequest(ids[: scale(len(ids))], asked) for ids in _uniform_prompts(Random(0), 64)[: scale(64)])
    return Workload(name="W11", purpose="four samples of 128 tokens for each of 64 prompts", requests=requests)


def poisson(workload: Workload, rate: float, seed: int = 0) -> Workload:
    """The same requests, arriving at random, `rate` per second; turns of a conversation still wait for the turn before."""
    if not rate > 0 or not math.isfinite(rate):
        raise InvalidInput(f"rate is {rate}; must be above 0, in requests per second")
    rng = Random(seed)
    firsts = [n for n, ask in enumerate(workload.requests) if ask.after is None]
    times = dict(zip(firsts, accumulate(rng.expovariate(rate) for _ in firsts), strict=True))
    requests = tuple(ask._replace(at=times.get(n, ask.at)) for n, ask in enumerate(workload.requests))
    return replace(workload, name=f"{workload.name}@{rate:g}", requests=requests)


def _several() -> dict[str, Callable[[Scale], Workload]]:
    """W5: several samples, or beams, per prompt."""
    made: dict[str, Callable[[Scale], Workload]] = {}
    for kind, lengths, count in (("alpaca", ALPACA, 500), ("sharegpt", SHAREGPT, 200)):
        for n in (2, 4, 6):
            for word, what, asked in (
                ("n", "samples", {"n": n}),
                ("beam", "beams", {"n": n, "beam_width": n, "temperature": 0.0}),
            ):
                name = f"W5-{kind}-{word}{n}"
                made[name] = partial(like, name, f"{n} {what} per prompt", lengths, count=count, **asked)
    return made


WORKLOADS: dict[str, Callable[[Scale], Workload]] = {
    "W1": uniform,
    "W2": partial(like, "W2", "lengths like ShareGPT's", SHAREGPT),
    "W3": partial(like, "W3", "lengths like Alpaca's", ALPACA),
    **{f"W4-{prefix}": partial(shared_prefix, prefix) for prefix in (80, 341, 2048)},
    **_several(),
    "W6": chat,
    "W7": long_prompts,
    "W8": little_memory,
    "W9": disturbed,
    "W10": alone,
    "W11": samples,
}


def named(words: Sequence[str], *, factor: float = 1.0, rate: float | None = None) -> list[Workload]:
    """The workloads of some names. The beginning of a name, up to a hyphen, stands for all that begin with it.

    Args:
        words: such as "W1", "W5", "W5-alpaca".
        factor: the share of their requests and lengths.
        rate: requests per second, arriving at random; None for all at once.

    Example:
        >>> [workload.name for workload in named(["W10", "W4"], factor=0.01)]
        ['W10', 'W4-80', 'W4-341', 'W4-2048']
    """
    if not 0 < factor <= 1:
        raise InvalidInput(f"scale is {factor}; must be above 0 and at most 1")
    found: dict[str, Workload] = {}
    for word in words:
        names = [name for name in WORKLOADS if name == word or name.startswith(f"{word}-")]
        if not names:
            raise InvalidInput(f"no workload is called {word!r}; has {', '.join(WORKLOADS)}")
        found |= {name: WORKLOADS[name](Scale(factor)) for name in names}
    return [workload if rate is None else poisson(workload, rate) for workload in found.values()]


def _drawn(lengths: Lengths, scale: Scale, count: int, **asked: Any) -> list[WorkloadRequest]:
    rng = Random(0)
    drawn = [lengths.draw(rng) for _ in range(count)]
    return [WorkloadRequest(_ids(rng, scale(prompt)), _sampled(scale(answer), **asked)) for prompt, answer in drawn]


def _uniform_prompts(rng: Random, count: int) -> list[list[int]]:
    return [[rng.randint(0, IDS) for _ in range(rng.randint(100, LONGEST))] for _ in range(count)]


def _sampled(limit: int, **asked: Any) -> SamplingParams:
    return SamplingParams(max_tokens=limit, ignore_eos=True, **asked)


def _ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(IDS) for _ in range(count)]


def _log_normal(rng: Random, mean: float, sigma: float) -> int:
    drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return min(max(1, round(drawn)), LONGEST)
