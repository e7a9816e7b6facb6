"""The host's time while nothing ran: many short lines, steps that wait in turns, exchanges, and time lost to other programs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rooftile.diagnosis.verdicts.step import StepEvidence, classify_step
from rooftile.diagnosis.watching import preempted, steps
from rooftile.diagnosis.watching.chosen_step import ChosenStep
from rooftile.diagnosis.watching.host_place import HostPlace
from rooftile.diagnosis.watching.idle import IdleTime
from rooftile.diagnosis.watching.mean_step import mean_step
from rooftile.diagnosis.watching.steps import StepTimer
from rooftile.diagnosis.watching.timeline import Gap, Timeline, timeline_of

CPU = torch.device("cpu")
MS = 1_000_000


def timeline(wall_us: float, *gaps: tuple[float, str], **more: Any) -> Timeline:
    """A step with gaps of some length in µs, by cause."""
    ends = [(int(1e3 * sum(us for us, _ in gaps[:n])), int(1e3 * sum(us for us, _ in gaps[: n + 1]))) for n in range(len(gaps))]
    made = tuple(Gap(*span, cause, "train.py:7") for span, (_, cause) in zip(ends, gaps, strict=True))
    given = {"op_us": {}, "op_calls": {}, "calls_us": {}, "kernels": {}, "launches": 3, "start_ns": 0} | more
    return Timeline(wall_us=wall_us, busy_us=wall_us - sum(us for us, _ in gaps), gaps=made, **given)


def test_short_lines_of_a_file_are_one_place_if_they_take_a_part_of_the_step() -> None:
    work = {HostPlace(f"env.py:{n}"): 200.0 for n in range(20)} | {HostPlace("data.py:3"): 900.0, HostPlace("log.py:9"): 100.0}
    idle = IdleTime(timeline(10_000.0, (6000.0, "host"), host_work=work), 10_000.0)
    assert idle.host_work == {HostPlace("data.py:3"): 900.0, HostPlace("20 short lines of env.py"): 4000.0}
    assert idle.waiting_us == 6000.0


def test_steps_that_wait_in_turns_are_their_mean() -> None:
    add, wait = ("aten::add", ((3,),)), HostPlace("loader.py:1")
    short = timeline(20_000.0, op_us={add: 500.0}, op_calls={add: 2}, calls_us={"aten::add": (400.0, 600.0)})
    long = timeline(
        66_000.0, (46_000.0, "host"), host_work={wait: 45_000.0}, op_us={add: 700.0}, op_calls={add: 2},
        calls_us={"aten::add": (800.0, 600.0)},
    )  # fmt: skip
    found = mean_step([short, long])
    assert (found.wall_us, found.busy_us, found.idle_us["host"]) == (43_000.0, 20_000.0, 23_000.0)
    assert found.calls_us == {"aten::add": (600.0, 600.0)}
    assert found.op_us == {add: 600.0}
    assert found.host_work == {wait: 22_500.0}
    assert IdleTime(found, found.wall_us).waiting_us == 23_000.0
    assert found.lines == {"train.py:7": 23_000.0}
    assert mean_step([short, replace(long, calls_us={"aten::add": (1.0,)})]).calls_us == {"aten::add": (1.0,)}


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_is_the_mean_where_its_own_waits_differ(waits: bool) -> None:
    slow = timeline(66e3, (46e3, "host")) if waits else timeline(66e3)
    profiles = [slow, timeline(20e3), slow]
    step = ChosenStep([20e3, 66e3] * 3, [(2 * n, SimpleNamespace(timeline=one)) for n, one in enumerate(profiles)])
    assert step.us == pytest.approx(43e3 if waits else 20e3)
    assert step.timeline.wall_us == pytest.approx(sum(one.wall_us for one in profiles) / 3 if waits else 20e3)
    assert ("wait for unequal times" if waits else "other programs") in step.noise()[0]


def event(name: str, start_us: float, us: float, thread: int = 1) -> SimpleNamespace:
    values = {
        "name": name, "device_type": torch._C._autograd.DeviceType.CPU, "start_ns": int(1e3 * start_us),
        "duration_ns": int(1e3 * us), "end_ns": int(1e3 * (start_us + us)), "start_thread_id": thread, "shapes": [],
    }  # fmt: skip
    return SimpleNamespace(**{word: lambda value=value: value for word, value in values.items()})


@pytest.mark.parametrize(("where", "asking", "waits_us"), [
    ("train.py:7", ["train.py:9"], 300.0), ("train.py:9", ["train.py:9"], 0.0), ("train.py:7", [], 0.0),
])  # fmt: skip
def test_a_gap_at_a_line_that_asks_for_no_operator_is_no_overhead(where: str, asking: list[str], waits_us: float) -> None:
    """An environment in numpy takes 300 us between two operators; a library's forward may take as long."""
    made = [event("aten::mm", 0, 100), event("aten::add", 400, 100)]
    lines = [(int(1e3 * at), HostPlace(where)) for at in range(120, 400, 50)]
    found = timeline_of(made, (0, MS // 2), (0, MS // 2), lines, False, lambda e: e.name().startswith("aten"), asking)
    assert IdleTime(replace(found, host_work={}), 500.0).waiting_us == pytest.approx(waits_us)


def test_a_gap_in_which_processes_exchange_is_no_time_of_the_host() -> None:
    made = [event("aten::mm", 0, 100), event("gloo:all_reduce", 150, 350, thread=9), event("aten::add", 500, 100)]
    made += [event("aten::mul", 900, 100)]
    found = timeline_of(made, (0, MS), (0, MS), [], False, lambda e: e.name().startswith("aten"))
    assert found.idle_us == pytest.approx({"host": 300.0, "exchange": 400.0, "sync": 0.0, "copy": 0.0, "dependency": 0.0})
    verdict = classify_step(StepEvidence(time_us=found.wall_us, idle_us=found.idle_us), [])
    assert verdict.shares["communication"] == pytest.approx(0.4)
    assert verdict.overhead_share == pytest.approx(0.3)


def test_a_graph_takes_no_wait_away() -> None:
    """60 of 100 µs wait for data, and a graph takes 35: what it saves beyond the wait is overhead."""
    step = StepEvidence(time_us=100.0, graph_us=35.0, idle_us={"host": 62.0}, waiting_us=60.0)
    verdict = classify_step(step, [])
    assert verdict.overhead_share == pytest.approx(0.05)
    assert verdict.bound == "host"


def test_time_that_other_programs_take_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = iter([1_000.0, 6_000.0])
    monkeypatch.setattr(steps, "preempted_us", lambda: next(lost))
    taken: list[float] = []
    with StepTimer(CPU, taken):
        time.sleep(0.02)
    assert 14_000 < taken[0] < 1e6
    monkeypatch.setattr(steps, "preempted_us", lambda: 0.0)
    with StepTimer(CPU, taken):
        time.sleep(0.02)
    assert taken[1] >= 20_000


def test_a_system_that_counts_nothing_lost_takes_nothing_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert preempted.preempted_us() >= 0
    monkeypatch.setattr(preempted, "SCHEDULER", tmp_path / "none")
    assert preempted.preempted_us() == 0.0
    (tmp_path / "none").write_text("1 2500 3")
    assert preempted.preempted_us() == 2.5
