"""Random mixes of requests, on a device whose cache holds tokens: each answer is told by all tokens that its row has read.

A model would hide a wrong block behind rounding, and takes a thousand times as long. Here the next token is a hash of what the
block table leads to, so a token of another answer, of a refused draft or of a freed block changes the answer.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rooftile.engine.engine import Engine
from rooftile.engine.requests.request import Request, Top
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.speculation.settings import Speculation
from rooftile.engine.speculation.speculator import Speculator
from rooftile.engine.steps.scheduler import StepPlan
from rooftile.errors import InvalidInput
from rooftile.kvcache import BlockPool
from rooftile.kvcache.reserved import ReservedPool

VOCABULARY, LONGEST = 12, 64
DRAFTS = (
    None, ("lookup", 7, None), ("lookup", 1, 1000), ("lookup", 15, 1000), ("guess", 7, None), ("guess", 4, 1000),
    ("guess", 7, 4), ("model", 3, 1000), ("model", 5, None),
)  # fmt: skip
seen = Counter[str]()


def next_token(read: Sequence[int], seed: int, mask: Any = None) -> int:
    """The answer goes on with it: often the last two tokens tell it, so that texts repeat, and else all of them do."""
    told = hash((tuple(read), seed))
    token = (sum(read[-2:]) * 5 + read[-1] + seed % 3 if told % 4 else told >> 8) % VOCABULARY
    return next(t % VOCABULARY for t in range(token, token + VOCABULARY) if mask is None or mask[0] >> t % VOCABULARY & 1)


def top_of(read: Sequence[int], count: int) -> Top:
    rng = random.Random(hash(tuple(read)))
    weights = [rng.random() + 0.01 for _ in range(VOCABULARY)]
    ids = sorted(range(VOCABULARY), key=lambda token: -weights[token])[:count]
    return Top(0.0, 1, ids, [math.log(weights[token] / sum(weights)) for token in ids])


class Rule:
    """Another mask every three tokens, which depends on the tokens before."""

    def __init__(self, seed: int, taken: tuple[int, ...] = ()) -> None:
        self.seed, self.taken = seed, taken
        rng = random.Random(hash((seed, taken[: len(taken) // 3 * 3])))
        self.free = 3 - len(taken) % 3
        self.mask = np.array([sum(1 << t for t in rng.sample(range(VOCABULARY), rng.choice([2, 6, VOCABULARY])))], np.int32)
        self.over = self.free == 3 and len(taken) > 3 and rng.random() < 0.15

    def fork(self) -> Rule:
        return Rule(self.seed, self.taken)

    def take(self, token: int) -> None:
        self.__init__(self.seed, (*self.taken, token))  # type: ignore[misc]


class Device:
    """A runner whose memory holds tokens."""

    adapters = None

    def __init__(self, pool: BlockPool) -> None:
        self.device = SimpleNamespace(type="cpu")
        self.decoder = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY, eos_ids=()))
        self._size = pool.size
        self._cells, self._table = dict[tuple[int, int], Any](), dict[tuple[int, int], int]()
        self._last, self._seeds = dict[int, int](), dict[int, int]()

    def run(self, plan: StepPlan) -> SimpleNamespace:
        self._seeds |= {answer.slot: answer.seed for answer in plan.started}
        self._table |= plan.entries
        for source, target in plan.copies:
            self._cells |= {(target, n): self._cells.get((source, n)) for n in range(self._size)}
        written = [cell for work in plan.work for cell in self._write(work)]
        assert len(set(written)) == len(written), "two tokens of a step are in one place"
        results = [self._result(work, answer) for work in plan.work for answer in work.outputs]
        return SimpleNamespace(wait=lambda: iter(results), prompt_tops=lambda: iter(()))

    def _cell(self, slot: int, position: int) -> tuple[int, int]:
        return self._table[slot, position // self._size], position % self._size

    def _write(self, work: Any) -> Iterator[tuple[int, int]]:
        answer = work.answer
        known = [*answer.ids[: work.start + 1], *work.draft.tokens] if work.draft.tokens else answer.ids
        for position in range(work.start, work.start + work.tokens):
            cell = self._cell(answer.slot, position)
            self._cells[cell] = known[position] if position < len(known) else self._last[answer.slot]
            yield cell

    def _result(self, work: Any, answer: Any) -> tuple[Any, ...]:
        tokens, tops, drafted = [], [], len(work.draft.tokens)
        for depth in range(drafted + 1):
            end = work.start + work.tokens - drafted + depth
            read = [self._cells.get(self._cell(work.answer.slot, position)) for position in range(end)]
            mask = None if answer.grammar is None else (answer.grammar.mask, *work.draft.masks)[depth]
            tokens.append(next_token(read, self._seeds[answer.slot], mask))
            tops.append(top_of(read, answer.request.top_count or 1))
        # the host has to know what became of a draft before it goes on
        self._last[answer.slot] = -1 if drafted else tokens[0]
        return answer, work.draft.tokens, tokens, tops


class Chance:
    """Guesses by chance, as a look-up and as a draft model, and says by chance whether drafts pay."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def most(self, answers: int, lengths: int, tokens: int) -> int:
        return self._rng.choice([0, tokens, tokens])

    def note(self, *_: Any) -> None: ...

    def can(self, *_: Any) -> bool:
        return self._rng.random() < 0.9

    def guess(self, known: Any, count: Any) -> Any:
        if isinstance(count, int):
            return self._after(known, count, self._rng.randrange(3)) if self._rng.random() < 0.7 else []
        assert all(answer.pending == 0 and answer.slot >= 0 for answer, _ in known)
        return {answer: self._after(answer.ids, n, answer.seed) for answer, n in known if self._rng.random() < 0.9}

    def _after(self, ids: Sequence[int], count: int, seed: int) -> list[int]:
        found = list(ids)
        for _ in range(count):
            found.append((next_token(found, seed) + (self._rng.random() < 0.2)) % VOCABULARY)
        return found[len(ids) :]


def made(rng: random.Random, pool: BlockPool, answers: int, tokens: int, drafts: Any = None) -> Engine:
    speculator = None
    if drafts is not None:
        kind, most, batch = drafts
        chance: Any = Chance(rng)
        asked = Speculation(tokens=most, shortest=1, longest=3, max_batch=batch)
        speculator = Speculator(asked, chance, rng.choice([8, 64, 512]), chance if kind == "model" else None)
        if kind == "guess":
            speculator.guesser = lambda *_: chance  # type: ignore[assignment]
    return Engine(
        Device(pool), pool, max_len=LONGEST, max_answers=answers, max_batched_tokens=tokens, speculator=speculator, seed=0
    )  # fmt: skip


def params_of(rng: random.Random) -> SamplingParams:
    usual = {"priority": rng.choice([0, 0, -1, 2]), "stop_token_ids": rng.choice([(), (), (3,)])}
    if rng.random() < 0.15:
        width = rng.choice([2, 3])
        return SamplingParams(
            max_tokens=rng.choice([3, 9, 20]), beam_width=width, n=rng.randint(1, width), temperature=0, **usual
        )
    return SamplingParams(
        max_tokens=rng.choice([1, 2, 5, 12, 30]), n=rng.choice([1, 1, 2, 5]), seed=rng.randrange(99), **usual,
        logprobs=rng.choice([None, None, 1]), speculative=rng.random() < 0.85,
    )  # fmt: skip


def due(request: Request, rule: int | None) -> list[tuple[list[int], str]]:
    """The answers of a request that is alone."""
    if request.search is not None:
        engine = made(random.Random(0), BlockPool(400, 4), 8, 4096)
        alone = engine.add(list(request.prompt), request.params)
        while not engine.idle:
            engine.step()
        return [(answer.ids, str(answer.finish_reason)) for answer in alone.answers]
    found = []
    for n in range(request.params.n):
        ids, steering, reason = list(request.prompt), None if rule is None else Rule(rule), None
        while reason is None:
            ids.append(next_token(ids, (request.params.seed or 0) + n, None if steering is None else steering.mask))
            if ids[-1] in request.ends:
                reason = "stop"
                break
            if steering is not None:
                steering.take(ids[-1])
            ended = steering is not None and steering.over
            reason = "stop" if ended else "length" if len(ids) == len(request.prompt) + request.limit else None
        found.append((ids, reason))
    return found


@pytest.mark.parametrize("first", [0, *(pytest.param(n * 150, marks=pytest.mark.sweep) for n in range(1, 10))])
def test_answers_are_those_of_requests_alone(first: int) -> None:
    """Drafts, beams, samples, rules and priorities come and are aborted at any step, with few blocks and slots."""
    seen.clear()
    for seed in range(first, first + 150):
        rng = random.Random(seed)
        size = rng.choice([2, 4, 8])
        needed, slots = LONGEST // size, rng.choice([1, 2, 3, 4, 6, 9, 30])
        pool: BlockPool = BlockPool(needed * rng.choice([4, 5, 8, 40]) // 4, size, prefixes=rng.random() < 0.7)
        if rng.random() < 0.1:
            pool = ReservedPool(needed * rng.choice([1, 3, 6]), size, reserve=LONGEST)
        engine = made(rng, pool, slots, max(slots, rng.choice([1, 5, 13, 4096])), rng.choice(DRAFTS))
        engine._ahead = rng.random() < 0.85
        begun = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 4, 7, 8, 9, 16, 30]))] for _ in range(4)]
        arrivals = Counter(rng.choice([0, 0, rng.randrange(60)]) for _ in range(rng.choice([1, 2, 5, 12])))
        asked, step = list[tuple[Request, int | None, int]](), 0
        while not engine.idle or step < 60:
            for _ in range(arrivals[step]):
                prompt = rng.choice(begun) + [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 0, 1, 5]))]
                try:
                    request = engine.add(prompt, params_of(rng))
                except InvalidInput:
                    # a search that the slots or blocks have no room for
                    continue
                rule = rng.randrange(999) if request.search is None and rng.random() < 0.3 else None
                for answer in request.answers:
                    answer.grammar = None if rule is None else Rule(rule)
                asked.append((request, rule, step + rng.randrange(90) if rng.random() < 0.2 else -1))
            for request, _, end in asked:
                if end == step and request.live:
                    engine.abort(request)
            if not engine.idle:
                engine.step()
            step += 1
            assert step < 5000, "a step has no work for ever"
        engine.check_idle()
        for request, rule, end in asked:
            found = [(answer.ids, answer.finish_reason) for answer in request.answers]
            assert request.error is None
            for (ids, reason), (wanted, why) in zip(found, due(request, rule), strict=False):
                if reason == "abort" and end >= 0:
                    assert request.search is not None or wanted[: len(ids)] == ids, f"seed {seed}"
                else:
                    assert (ids, reason) == (wanted, why), f"seed {seed}"
        seen["preemptions"] += engine.scheduler.preemptions
        seen["accepted"] += 0 if engine.speculator is None else engine.speculator.counts["accepted"]
    assert min(seen["preemptions"], seen["accepted"]) > 100
