"""The engine that answers a prompt: the choice, the blocks that are known, the GPUs of each replica, and starts again."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftile.engine.start.replica import VISIBLE, share_machine
from rooftile.errors import InvalidInput
from rooftile.server.replicas import replica
from rooftile.server.replicas.devices import environments
from rooftile.server.replicas.prefixes import Prefixes, blocks_of
from rooftile.server.replicas.replica import Replica
from rooftile.server.routing import FAIR, Known, choose, looked_at
from rooftile.server.settings import ServerSettings

TOKENS = st.integers(0, 100_000)
ENGINES = st.lists(st.builds(Known, TOKENS, st.sampled_from([0, 0, 16, 512, 4096])), min_size=1, max_size=9)
TURNS = st.integers(0, 1000)


@given(ENGINES, TURNS)
def test_an_engine_is_ahead_of_its_share_only_by_what_it_saves(engines: list[Known], turn: int) -> None:
    chosen = engines[choose(engines, turn)]
    assert choose(list(engines), turn) == choose(engines, turn), "the same knowledge, another choice"
    cached = [each.cached for each in engines]
    first, second = looked_at(len(engines), turn)
    saved = max(cached) - min(cached)
    fair = FAIR * sum(each.load for each in engines) / len(engines) + saved
    if saved and chosen.cached == max(cached) and chosen.load <= fair:
        return
    assert chosen.load == min(engines[first].load, engines[second].load)
    # the blocks were left only because every engine that has them is too far ahead
    assert not saved or all(each.load > fair for each in engines if each.cached == max(cached))


@given(st.lists(TOKENS, min_size=1, max_size=9), TURNS)
def test_the_least_loaded_engine_does_not_starve(loads: list[int], turn: int) -> None:
    engines = [Known(load) for load in loads]
    chosen = {choose(engines, turn + more) for more in range(len(engines))}
    assert min(loads) in {loads[place] for place in chosen}


@given(st.integers(2, 9), TURNS)
def test_two_different_engines_are_looked_at(count: int, turn: int) -> None:
    pairs = [looked_at(count, turn + more) for more in range(count * (count - 1))]
    assert all(first != second for first, second in pairs)
    assert len(set(pairs)) == len(pairs), "every pair comes before one comes again"


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 7), st.booleans()), max_size=80))
def test_loads_of_two_engines_stay_near_each_other(requests: list[tuple[int, int, bool]]) -> None:
    """Prompts of eight families come, and some end: an engine is ahead of the other by no more than its blocks save."""
    held: list[list[int]] = [[], []]
    known: list[dict[int, int]] = [{}, {}]
    for turn, (size, family, ends) in enumerate(requests):
        loads = [sum(each) for each in held]
        engines = [Known(load, min(size, own.get(family, 0))) for load, own in zip(loads, known, strict=True)]
        place = choose(engines, turn)
        saved = abs(engines[0].cached - engines[1].cached)
        assert loads[place] <= max(FAIR * sum(loads) / 2 + saved, min(loads))
        held[place].append(size)
        known[place][family] = max(known[place].get(family, 0), size)
        if ends:
            held[turn % 2] = held[turn % 2][1:]


def test_blocks_of_a_prompt_are_known_by_all_that_comes_before_them() -> None:
    prompt = list(range(40))
    blocks = blocks_of(prompt, "salt", 16)
    assert len(blocks) == 2
    assert blocks_of(prompt[:33], "salt", 16) == blocks
    assert blocks_of([1, *prompt[1:]], "salt", 16)[1] != blocks[1]
    assert not set(blocks_of(prompt, "pepper", 16)) & set(blocks)
    assert blocks_of(prompt[:15], "salt", 16) == []
    # the first block's tokens do not stand for themselves in another place
    assert blocks_of(prompt[:16] * 2, "salt", 16)[0] != blocks_of(prompt[:16] * 2, "salt", 16)[1]


def test_the_blocks_that_were_used_last_are_known() -> None:
    known = Prefixes(4)
    first, second = [1, 2, 3], [1, 2, 7]
    known.add(first)
    assert known.count([1, 2, 3, 4]) == 3
    known.add(second)
    assert (known.count(first), known.count(second)) == (3, 3)
    known.add([9])
    # the end of the older prompt is gone, and its beginning is the other's
    assert (known.count(first), known.count(second), known.count([9])) == (2, 3, 1)
    known.add([11, 12, 13, 14, 15])
    assert (known.count([11, 12, 13, 14, 15]), known.count([9])) == (4, 0)
    assert Prefixes(0).count([1]) == 0


@pytest.mark.parametrize(
    ("count", "settings", "given", "due"),
    [
        (1, {"device": "cuda:1"}, None, [None]),
        (2, {}, None, ["0", "1"]),
        (2, {"tensor_parallel_size": 2}, None, ["0,1", "2,3"]),
        (2, {"device": "cuda"}, "5, GPU-ab,7", ["5", "GPU-ab"]),
        (3, {"device": "cpu"}, "0", [None] * 3),
        (3, {}, "", [None] * 3),
        (3, {}, "0,1", "3 replicas of 1 GPU ask for 3; CUDA_VISIBLE_DEVICES names 2: 0,1"),
        (2, {"tensor_parallel_size": 2}, "0,1,2", "2 replicas of 2 GPUs ask for 4; CUDA_VISIBLE_DEVICES names 3"),
        (2, {"device": "cuda:1"}, None, "--device is cuda:1, and each of 2 replicas has a GPU of its own"),
    ],
)
def test_each_replica_has_its_own_gpus(count: int, settings: dict, given: str | None, due: Any) -> None:
    if isinstance(due, str):
        with pytest.raises(InvalidInput, match=due):
            environments(count, settings, given)
    else:
        assert [each.get(VISIBLE) for each in environments(count, settings, given)] == due


def test_too_few_gpus_are_refused_and_not_replaced_by_a_cpu(monkeypatch) -> None:
    there = {"2": 0, None: 2}
    monkeypatch.setenv(VISIBLE, "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there[os.environ.get(VISIBLE)])
    with pytest.raises(InvalidInput, match="3 replicas of 1 GPU ask for 3; the machine has 2"):
        share_machine(3, {}, None)
    assert os.environ[VISIBLE] == "2"
    # a machine without GPUs: its cores are shared
    threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    try:
        torch.set_num_threads(4)
        share_machine(3, {}, None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("replicas", "why"), [(0, "--replicas is 0; must be at least 1"), (65, "may be at most 64")])
def test_a_number_of_replicas_that_makes_no_sense(replicas: int, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        ServerSettings(model="m", replicas=replicas)


class FakeEngine:
    """An engine that answers, or not, and dies when it is told to."""

    made: list[FakeEngine]
    answers_at_once = True

    def __init__(self, settings: dict, **more: Any) -> None:
        self.made.append(self)
        self.cause, self.detail, self.wrong, self.load = None, "", False, 0
        self.ready = SimpleNamespace(blocks=9) if self.answers_at_once else None
        self.over, self.changed = asyncio.Event(), asyncio.Event()
        if self.answers_at_once:
            self.changed.set()

    @property
    def answers(self) -> bool:
        return self.ready is not None and self.cause is None

    def die(self, *, wrong: bool = False) -> None:
        self.cause, self.wrong = "it has died", wrong
        self.over.set()
        self.changed.set()

    async def close(self) -> None:
        self.closed = True


async def lives(monkeypatch, *, restarts: bool = True, dies: int = 9, wrong: bool = False) -> tuple[Replica, list[float]]:
    """Returns a replica whose engines have died one after the other, and the pauses between them."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def fast(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    FakeEngine.made = []
    monkeypatch.setattr(replica, "RemoteEngine", FakeEngine)
    monkeypatch.setattr(replica.asyncio, "sleep", fast)
    made = Replica("one", {}, {}, stall_s=1.0, noted=lambda stats: None, changed=lambda: None, restarts=restarts)
    for count in range(dies):
        while len(FakeEngine.made) <= count and not made.out:
            await sleep(0)
        if made.out:
            break
        assert all(each.closed for each in FakeEngine.made[:-1]), "the process before may still have the GPU"
        FakeEngine.made[-1].die(wrong=wrong)
    for _ in range(5):
        await sleep(0)
    return made, pauses


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_dies_is_started_three_times_more(answers, monkeypatch) -> None:
    monkeypatch.setattr(FakeEngine, "answers_at_once", answers)
    made, pauses = asyncio.run(lives(monkeypatch))
    assert pauses == [1.0, 4.0, 16.0]
    assert (made.starts, made.out, made.state) == (3, True, "out")


def test_an_engine_that_has_answered_for_long_may_die_again(monkeypatch) -> None:
    monkeypatch.setattr(replica, "STEADY_S", -1.0)
    made, pauses = asyncio.run(lives(monkeypatch, dies=6))
    assert pauses == [1.0] * 6
    assert not made.out


def test_a_wrong_setting_is_not_tried_again(monkeypatch) -> None:
    made, pauses = asyncio.run(lives(monkeypatch, wrong=True))
    assert (pauses, made.out) == ([], True)
    made, pauses = asyncio.run(lives(monkeypatch, restarts=False))
    assert (pauses, made.out) == ([], True)
