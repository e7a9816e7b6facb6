"""The budget on a simulated clock, which runs only while a simulated program's operators or steps do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rooftile.diagnosis.experiments import deadline, series
from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.intensity.ladder import Ladder
from rooftile.diagnosis.experiments.series import Recorded, measure_all
from rooftile.diagnosis.experiments.step import NO_TIME, batch_shares
from rooftile.diagnosis.experiments.timing import interleaved
from rooftile.diagnosis.observer import Observer
from rooftile.diagnosis.records import OperatorRow, Sample
from rooftile.diagnosis.remedies.apply import Trial
from rooftile.diagnosis.remedies.bf16 import in_bf16
from rooftile.diagnosis.remedies.bf16.in_bf16 import shares_in_bf16
from rooftile.diagnosis.watching.steps import Finished, Steps
from rooftile.errors import Unsupported

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass only where a test lets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(deadline, "clock", found)
    return found


class SlowTimer:
    """Takes as long as the calls do, in which alone the simulated time passes."""

    cache_bytes = 1 << 10
    tried = 0, 64

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def once(self, call: RepeatableCall, *, cold: bool) -> float:
        began = self._clock.now
        call.run()
        return (self._clock.now - began) * 1e6

    def used(self, call: RepeatableCall, *, cold: bool = True) -> float:
        # as on a CPU, with threads awake and asleep
        return min(self.once(call, cold=cold), self.once(call, cold=cold))

    def burst(self, call: RepeatableCall) -> float:
        return self.once(call, cold=False)

    def threads(self, call: RepeatableCall) -> float:
        return 1.0


def slow_calls(clock: Clock, seconds: float, count: int) -> dict[int, Recorded]:
    """Operators that take so long on 4,096 numbers, and less on fewer."""

    def slow(x: torch.Tensor) -> torch.Tensor:
        clock.now += seconds * x.numel() / 4096
        return x + 1

    operation = OperatorRow(
        module="", op="lab::slow", phase="forward", calls=1, flops=0, special=0, bytes=0, where="", dtype="fp32", device="cpu",
        key=(), indices=(0,),
    )  # fmt: skip
    return {n: Recorded(Sample(operation, slow, (torch.ones(64, 64),), {}), seconds * 1e6) for n in range(count)}


def test_what_is_expected_to_end_too_late_does_not_begin(clock: Clock) -> None:
    until = Deadline(10.0)
    assert until.allows(10.0)
    assert not until.allows(10.1)
    assert not until.but(4.0).allows(7.0)
    assert until.within(3.0).left_s == until.within(3.0).but(0.0).left_s == 3.0
    assert until.within(30.0).left_s == 10.0
    clock.now += 10.0
    assert not until.allows(0.0)
    # what has begun is finished if it is short
    assert until.allows_rest(0.1)
    assert not until.allows_rest(1.0)
    assert Deadline().allows(1e9)


@pytest.mark.parametrize("seconds", [0.003, 0.04, 0.3, 1.0, 1.9, 7.0, 40.0])
def test_slow_operators_end_within_twice_the_budget(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """In fact within it and one operator's last runs, however slow they are."""
    monkeypatch.setattr(series, "timer_for", lambda device: SlowTimer(clock))
    began, budget = clock.now, 10.0
    found, notes = measure_all(slow_calls(clock, seconds, 20), CPU, Deadline(budget), lambda row, evidence: False)
    assert clock.now - began <= budget + max(0.5, seconds)
    assert len(found) == 20 or any(note.startswith(f"{20 - len(found)} kind") for note in notes)
    # there is something to say about the most expensive one, where the budget has room for it
    assert (0 in found) == (seconds < 7.0)
    if seconds <= 0.3:
        assert found[0].fixed_us is not None
    if seconds == 1.9:
        assert found[0].why_not["size"] == "the budget ended before it"
        assert notes == ["19 kinds of operator (slow), whose calls take up to 1.9 s, had no experiment in the budget: "
                         "a larger --budget has more"]  # fmt: skip


def test_works_that_are_slower_than_expected_are_given_up(clock: Clock) -> None:
    def slow() -> float:
        clock.now += 6.0
        return 6e6

    with pytest.raises(Unsupported, match="the budget ended before it"):
        interleaved({"a": slow, "b": slow}, 10.0, Deadline(10.0))
    assert clock.now == 106.0
    # three rounds at least, and no fourth that would end too late
    clock.now = 100.0
    assert len(interleaved({"a": slow}, 1.0, Deadline(20.0))["a"]) == 3


def test_no_kernel_is_compiled_that_would_be_ready_too_late(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftile.diagnosis.experiments.intensity.ladder._COMPILED", {})
    monkeypatch.setattr("rooftile.diagnosis.experiments.intensity.ladder._TAKEN_S", [4.0, 4.0, 4.0])
    monkeypatch.setattr(Ladder, "_compiled", lambda self, count: clock.work(4.0)() or torch.neg)
    ladder = Ladder(RepeatableCall(torch.ops.aten.neg.default, (torch.ones(9),)), Deadline(13.0))
    ladder.rung(1)
    with pytest.raises(Unsupported, match="the budget ended before its kernels were compiled"):
        ladder.rung(2)
    assert clock.now == 108.0


@pytest.mark.parametrize("step_s", [0.01, 0.2, 1.0, 5.0])
def test_other_batches_run_only_where_there_is_time(clock: Clock, step_s: float) -> None:
    works = {factor: clock.work(factor * step_s) for factor in (0.5, 2.0)}
    began, budget = clock.now, 10.0
    shares, reason = batch_shares(clock.work(step_s), works, CPU, step_s, Deadline(budget))
    assert clock.now - began <= budget
    assert (shares == {}) == (step_s >= 1.0) == (reason == NO_TIME)


def test_a_batch_that_is_slower_than_expected_is_given_up(clock: Clock) -> None:
    shares, reason = batch_shares(clock.work(0.1), {0.5: clock.work(0.1), 2.0: clock.work(4.0)}, CPU, 0.1, Deadline(10.0))
    assert (shares, reason) == ({}, NO_TIME)
    assert clock.now <= 110.0


def test_bf16_is_tried_only_where_it_is_expected_to_end_in_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [one.sample.operation for one in slow_calls(clock, 1.0, 3).values()]
    monkeypatch.setattr(in_bf16, "narrower_share", lambda *unused: clock.work(8.0)() or 0.5)
    kinds = {(n,): [n] for n in range(3)}
    found, too_late = shares_in_bf16(operations, kinds, {}, dict.fromkeys(kinds, 1e6), CPU, Deadline(20.0))
    assert (found, too_late) == ({0: 0.5, 1: 0.5}, {2})
    assert clock.now == 116.0


def test_a_trial_ends_in_time_with_the_pairs_that_there_are(clock: Clock) -> None:
    def tried(seconds: float) -> Trial:
        trial = Trial("dtype", CPU, 1e6, Deadline(seconds))
        steps = Steps(trial.roles, lambda: None)

        def run() -> None:
            while True:
                steps.begin()
                clock.now += 1.0
                steps.end()

        with pytest.raises((Finished, Unsupported)) as ended:
            run()
        assert (ended.type is Finished) == (len(trial._after) >= 3)
        return trial

    # one step finds the modules, two warm up, two are looks
    assert [len(tried(seconds)._after) for seconds in (8.5, 11.5, 15.5)] == [1, 3, 5]


def test_a_slow_program_has_fewer_steps(clock: Clock) -> None:
    def steps_of(seconds: float) -> int:
        observer = Observer("a step", 10.0)
        done = []
        steps = Steps(observer.roles, lambda: done.append(True))
        count = 0
        while not done:
            steps.begin()
            clock.now += seconds
            steps.end()
            # what a real step would have taken
            observer._taken[:] = [seconds * 1e6] * len(observer._taken)
            count += 1
        return count

    assert [steps_of(seconds) for seconds in (0.01, 0.6, 5.0)] == [19, 12, 9]
