"""A hundred thousand operations on states: the scheduler, its pool and the states that are kept, on rows that hold no numbers.

In place of a model a row of states holds a hash of all tokens that were read into it. So a row that is copied too late, from a
wrong place, or by two, differs from the hash that is computed anew.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from rooftile.engine.requests.request import Answer, Request
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps import state_plan
from rooftile.engine.steps.scheduler import Scheduler, StepPlan
from rooftile.kvcache import BlockPool, BlockTable
from rooftile.kvcache.states import Snapshots, StateRows

PARAMS = SamplingParams()
WORDS = 3  # few tokens, so that prompts meet by chance, too
LONGEST = 48


def state_of(tokens: Sequence[int]) -> int:
    """The state after tokens, computed anew."""
    state = 0
    for token in tokens:
        state = hash((state, token))
    return state


class WatchedSnapshots(Snapshots):
    """Compares each answer with lists: what is kept, least recently used first, bets apart, and what the step writes."""

    counts: Counter[str]

    def reset(self) -> None:
        super().reset()
        self.order: list[tuple[bytes, int]] = []
        self.bets: list[tuple[bytes, int]] = []
        self.coming: list[tuple[bytes, int, bool]] = []

    def next_step(self) -> None:
        super().next_step()
        self.order += [known[:2] for known in self.coming if not known[2]]
        self.bets += [known[:2] for known in self.coming if known[2]]
        self.coming = []

    def find(self, digest: bytes) -> int | None:
        found = super().find(digest)
        due = next((known for known in (*self.order, *self.bets) if known[0] == digest), None)
        assert (found is None) == (due is None)
        if due is not None:
            assert found == due[1]
            (self.bets if due in self.bets else self.order).remove(due)
            self.order.append(due)
            self.counts["hit"] += 1
        return found

    def keep(self, digest: bytes, *, bet: bool = False) -> int | None:
        place = super().keep(digest, bet=bet)
        places = {known[0]: known[1] for known in (*self.order, *self.bets, *self.coming)}
        if digest in places or (len(places) == self.total and len(self.coming) == self.total):
            assert place is None
            return place
        assert place is not None
        if len(places) == self.total:
            # the least recently used gives way, or the oldest bet where bets have more than a quarter
            first = self.bets if self.bets and (4 * len(self.bets) > self.total or not self.order) else self.order or self.bets
            assert place == first.pop(0)[1]
            self.counts["evict"] += 1
        else:
            assert place not in places.values()
        self.coming.append((digest, place, bet))
        self.counts["bet" if bet else "checkpoint"] += 1
        return place


class WatchedPool(BlockPool):
    """Checks that each new table begins after the last of its blocks that has a state."""

    def begin(self, tokens: Sequence[int], salt: str = "") -> BlockTable:
        table = super().begin(tokens, salt)
        assert table.length <= table.found < len(tokens)
        digest, last = self._salted(salt), 0
        for end in range(self.size, table.found + 1, self.size):
            digest = self._digest(digest, array("q", tokens[end - self.size : end]).tobytes())
            if self.snapshots.has(digest):
                last = end
        assert table.length == last
        return table


class Setting(NamedTuple):
    """An engine without a model."""

    blocks: int
    answers: int
    kept: int
    every: int
    batched: int
    ahead: bool
    size: int = 4


class World:
    """The scheduler of an engine, a device whose rows are hashes, and callers that do anything at any time."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.rng = setting, random.Random(seed)
        self.counts = Counter[str]()
        self.pool = WatchedPool(setting.blocks, setting.size)
        self.pool.snapshots = WatchedSnapshots(setting.kept)
        self.pool.snapshots.counts = self.counts
        self.rows = StateRows(setting.answers, setting.kept)
        self.scheduler = Scheduler(self.pool, setting.answers, setting.batched, states=self.rows, state_every=setting.every)
        self.memory = [self.rng.random() for _ in range(self.rows.total)]
        self.memory[self.rows.zeros] = 0
        self.last: dict[int, int] = {}  # the last token of each slot, which the host does not know yet
        self.in_flight: list[tuple[Answer, int]] | None = None
        self.live: list[Request] = []
        self.beginnings = [self.tokens(LONGEST) for _ in range(3)]
        self.drawn: dict[Answer, int] = {}  # what the beams of a search have got

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(WORDS) for _ in range(count)]

    def ask(self) -> None:
        """A new request, which has a beginning with others in common: of one answer, of samples, or of beams."""
        rng = self.rng
        prompt = rng.choice(self.beginnings)[: rng.randrange(LONGEST)] + self.tokens(rng.choice((1, 2, 9)))
        answers, limit = rng.choice((1, 1, 1, 2, 3)), rng.randint(1, 12)
        beams = answers > 1 and rng.random() < 0.5
        if self.scheduler.needed_by(len(prompt), limit, answers if beams else 1) > self.pool.total:
            return
        request = Request(self.counts["ask"], prompt, PARAMS, limit, frozenset(), rng.choice(("", "", "other")))
        request.answers = [Answer(request, n, n, list(prompt)) for n in range(answers)]
        if beams:
            # the scheduler only asks whether there is a search
            request.search, request.needs_host = object(), True
        self.live.append(request)
        self.scheduler.add(request)
        self.counts["ask"] += 1

    def cancel(self) -> None:
        request = self.rng.choice(self.live)
        self.end(request)
        self.counts["cancel"] += 1

    def end(self, request: Request) -> None:
        for answer in request.live:
            answer.finish_reason = "abort"
        self.scheduler.abort(request)
        self.live.remove(request)

    def fail(self) -> None:
        """A step that fails: all requests are aborted, and nobody trusts the books any more."""
        self.in_flight = None
        for request in self.scheduler.reset():
            for answer in request.live:
                answer.finish_reason = "abort"
        self.live.clear()
        self.drawn.clear()
        self.counts["fail"] += 1

    def step(self) -> None:
        preempted = self.scheduler.preemptions
        plan = self.scheduler.schedule()
        self.counts["preempt"] += self.scheduler.preemptions - preempted
        assert plan.work or self.in_flight is not None or self.scheduler.idle, "requests wait, and none can run"
        launched = self.launch(plan) if plan.work else None
        if self.in_flight is not None:
            self.collect(self.in_flight)
        self.in_flight = launched
        if launched is not None and not self.setting.ahead:
            self.collect(launched)
            self.in_flight = None
        self.check_slots()

    def copy(self, copies: dict[int, int]) -> None:
        assert self.rows.zeros not in copies
        read = {target: self.memory[source] for target, source in copies.items()}
        for target, state in read.items():
            self.memory[target] = state

    def launch(self, plan: StepPlan) -> list[tuple[Answer, int]]:
        """Runs a step: each sequence begins with the state of all its tokens before."""
        self.copy(plan.states)
        self.counts["begin"] += len(plan.states)
        assert len({id(work.answer) for work in plan.work}) == len(plan.work), "two parts of one sequence in a step"
        for answer, start, count, _, kept, _, _ in plan.work:
            assert answer.slot >= 0
            rows = dict(kept)
            assert all(start < end < start + count for end in rows), "a mark outside of a chunk"
            assert self.memory[answer.slot] == state_of(answer.ids[:start]), f"{answer.ids[:start]} has the state of other tokens"
            for place in range(start, start + count):
                token = answer.ids[place] if place < len(answer.ids) else self.last[answer.slot]
                self.memory[answer.slot] = hash((self.memory[answer.slot], token))
                if (row := rows.get(place + 1)) is not None:
                    assert row >= self.rows.first_snapshot
                    assert place + 1 <= len(answer.request.prompt), "the state of an answer is kept"
                    assert (place + 1) % self.setting.size == 0
                    self.memory[row] = self.memory[answer.slot]
                    self.counts["within"] += 1
            self.counts["extend"] += 1
        found = []
        for work in plan.work:
            for answer in work.outputs:
                token = self.last[answer.slot] = self.rng.randrange(WORDS)
                found.append((answer, token))
            self.counts["fork"] += sum(answer is not work.answer for answer in work.outputs)
        # a row past the slots of answers pads steps, and is nobody's
        self.memory[self.setting.answers] = self.rng.random()
        self.copy(plan.states_after)
        for target, source in plan.states_after.items():
            if target >= self.rows.first_snapshot:
                work = next(work for work in plan.work if work.answer.slot == source)
                end = work.start + work.tokens
                assert end <= len(work.answer.request.prompt), "the state of an answer is kept"
                assert end % self.setting.size == 0
                assert self.memory[target] == state_of(work.answer.ids[:end])
        return found

    def collect(self, results: list[tuple[Answer, int]]) -> None:
        for answer, token in results:
            request = answer.request
            answer.pending -= 1
            if answer.finish_reason is not None:
                continue
            if request.search is not None:
                self.drawn[answer] = token
                if all(each in self.drawn for each in request.answers):
                    self.choose_beams(request)
                continue
            answer.ids.append(token)
            if answer.generated == request.limit or self.rng.random() < 0.03:
                answer.finish_reason = "stop"
                self.scheduler.finish(answer)
                if not request.live:
                    self.live.remove(request)
            elif answer.table is not None and len(answer.ids) // self.setting.size > answer.table.sealed:
                self.scheduler.seal(answer, len(answer.ids))

    def choose_beams(self, request: Request) -> None:
        answers = request.answers
        parents = [self.rng.randrange(len(answers)) for _ in answers]
        ids = [[*answers[parent].ids, self.drawn[answers[parent]]] for parent in parents]
        for answer in answers:
            del self.drawn[answer]
        if len(ids[0]) - len(request.prompt) >= request.limit:
            self.end(request)
            return
        self.scheduler.fork_beams(answers, parents)
        self.counts["fork"] += sum(parent != n for n, parent in enumerate(parents))
        for answer, known in zip(answers, ids, strict=True):
            answer.ids = known

    def check_slots(self) -> None:
        """No row is in two hands, and none is lost."""
        held = [answer.slot for request in self.live for answer in request.answers if answer.slot >= 0]
        assert sorted([*held, *self.scheduler._slots]) == list(range(self.setting.answers))
        # a key of a search that was cancelled would count for the next one
        self.drawn = {answer: token for answer, token in self.drawn.items() if answer.finish_reason is None}

    def run(self, operations: int) -> None:
        while self.counts.total() < operations:
            chance = self.rng.random()
            if chance < 0.25 and len(self.live) < 2 * self.setting.answers:
                self.ask()
            elif chance < 0.28 and self.live:
                self.cancel()
            elif chance < 0.281:
                self.pool.forget_prefixes()
                self.counts["forget"] += 1
            elif chance < 0.2815:
                self.fail()
            else:
                self.step()
            if chance > 0.98:
                self.pool.check()
        while not self.scheduler.idle or self.in_flight is not None:
            self.step()
        assert self.live == []
        assert self.pool.used_blocks == 0
        self.pool.check()


SETTINGS = {
    "room": Setting(200, 6, 5, 8192, 40, ahead=False),
    "room, ahead": Setting(200, 6, 5, 16, 40, ahead=True),
    "few blocks": Setting(30, 5, 3, 8192, 13, ahead=False),
    "few blocks, ahead": Setting(30, 5, 3, 9, 13, ahead=True),
    "one state": Setting(25, 3, 1, 8192, 7, ahead=True),
    "bets": Setting(200, 6, 12, 16, 40, ahead=True),
    "many states": Setting(60, 4, 60, 4, 30, ahead=True, size=2),
}


@pytest.mark.parametrize("operations", [20_000, pytest.param(100_000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_sequence_has_the_state_of_its_own_tokens(name: str, operations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_plan, "FIRST", 8)
    world = World(SETTINGS[name], seed=len(name))
    world.run(operations)
    kinds = {"ask", "begin", "extend", "fork", "checkpoint", "hit", "cancel", "bet", "within"}
    kinds |= {"preempt"} if SETTINGS[name].blocks < 50 else set()
    kinds |= {"evict"} if name != "many states" else set()
    assert {kind: world.counts[kind] for kind in kinds if world.counts[kind] < operations // 1000} == {}


@pytest.mark.parametrize(("with_states", "due"), [(False, 70 + 30), (True, 70 + 70)])
def test_a_search_that_fits_runs_again_after_a_preemption(with_states: bool, due: int) -> None:
    """A pool of as many blocks as the search takes, none of them to spare: each beam has read all but its last token."""
    prompt, limit = [1] * 160, 118
    made = []
    for total in (due, due - 1):
        pool = BlockPool(total, 4)
        pool.snapshots = Snapshots(1) if with_states else None
        scheduler = Scheduler(pool, 2, 300, states=StateRows(2, 1) if with_states else None)
        assert total < due or pool.watermark > 0
        request = Request(0, prompt, PARAMS, limit, frozenset(), search=object(), needs_host=True, prefilled=True)
        request.answers = [Answer(request, n, n, [*prompt, *[n] * (limit - 1)]) for n in range(2)]
        scheduler.add(request)
        assert scheduler.needed_by(len(prompt), limit, 2) == due
        made.append([work.answer.index for work in scheduler.schedule().work])
    # the others wait where there is one block less, which `needed_by` has refused
    assert [bool(each) for each in made] == [True, False]
