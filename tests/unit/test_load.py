"""The load of other programs: busy time of the cores that this process may use, less its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rooftile.hardware import ceilings, load
from tests.unit.test_hardware import MADE

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
HEAD = "cpu  9 9 9 9 9 9 9 9 0 0\n"


@pytest.fixture
def stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns what writes the busy seconds of two cores and of a third, which is not ours; clocks stand still but for `at`."""
    path, clock = tmp_path / "stat", {"now": 0.0, "own": 0.0}
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2})
    monkeypatch.setattr(load.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(load, "_own_seconds", lambda: clock["own"])
    ticks = os.sysconf("SC_CLK_TCK")

    def write(first: float, second: float, foreign: float = 0.0, *, now: float = 0.0, own: float = 0.0) -> Path:
        clock["now"], clock["own"] = now, own
        one, two, three = (round(seconds * ticks) for seconds in (first, second, foreign))
        # user and, for the third core, stolen time; idle and waiting count as nothing
        cores = f"cpu0 {one} 0 0 777 55 0 0 0 3 0\ncpu1 {three} 0 0 1 1 0 0 0 0 0\ncpu2 0 0 0 5 5 0 0 {two} 0 0\n"
        path.write_text(f"{HEAD}{cores}intr 1\n")
        return path

    return write


def test_others_are_the_busy_time_of_our_cores_less_our_own(stat) -> None:
    meter = load.Meter(stat(10.0, 20.0, 5.0, now=100.0, own=1.0))
    stat(12.0, 23.0, 500.0, now=104.0, own=2.0)
    # 5 of 8 seconds were busy, one of them ours
    assert meter.others() == pytest.approx(1.0)
    meter.restart()
    stat(12.0, 23.0, now=106.0, own=2.0)
    assert meter.others() == 0.0


def test_an_interval_that_is_too_short_has_no_load(stat) -> None:
    meter = load.Meter(stat(1.0, 1.0))
    stat(1.0, 1.0, now=load.LEAST_S / 2)
    assert meter.others() is None


def test_clocks_that_differ_by_a_tick_give_no_load_below_zero_or_above_all_cores(stat) -> None:
    meter = load.Meter(stat(1.0, 1.0))
    stat(1.0, 1.01, now=1.0, own=0.05)
    assert meter.others() == 0.0
    stat(9.0, 9.0, now=1.0)
    assert meter.others() == 2.0


def test_without_the_kernels_counts_the_load_is_unknown(tmp_path: Path) -> None:
    assert load.busy_seconds(tmp_path / "absent") is None
    assert load.words(None) == "the load of other programs is unknown"


def test_a_ceiling_keeps_the_load_of_the_measurement_that_it_comes_from() -> None:
    from dataclasses import replace

    quiet = replace(MADE, copy_gbs=9.0, busy_cores={"copy_gbs": 0.1, "fp32 product": 0.1})
    busy = replace(MADE, copy_gbs=3.0, matmul_tflops={"fp32": 7.0}, busy_cores={"copy_gbs": 1.9, "fp32 product": 1.8})
    for found in (ceilings.higher(quiet, busy), ceilings.higher(busy, quiet)):
        assert found.copy_gbs == 9.0
        assert found.busy_cores == {"copy_gbs": 0.1, "fp32 product": 1.8}


@pytest.mark.parametrize(
    ("before", "now", "again"), [(1.8, 0.1, True), (1.8, 1.7, False), (0.01, 0.0, False), (1.8, None, False)]
)
def test_ceilings_of_a_busy_machine_are_measured_again_when_it_is_quieter(
    before: float, now: float | None, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    kept, better = replace(MADE, busy_cores={"copy_gbs": before}), replace(MADE, copy_gbs=99.0)
    monkeypatch.setattr(ceilings, "_looked_at", set())
    monkeypatch.setattr(ceilings, "LOOK_S", 0.0)
    monkeypatch.setattr(ceilings, "measure", lambda device, say=None: kept)
    monkeypatch.setattr(ceilings, "measure_again", lambda device, say=None: better)
    monkeypatch.setattr(ceilings.load, "cores", lambda: 2)
    monkeypatch.setattr(ceilings.load.Meter, "others", lambda self: now)
    assert ceilings.measure_when_quieter("cpu") is (better if again else kept)
    # one look for each process
    assert ceilings.measure_when_quieter("cpu") is kept


def test_what_is_measured_is_said_step_by_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ceilings, "_MEASURED", {})
    for name in ("copy", "cache_copy", "exponentials", "launch_us", "operator_us"):
        monkeypatch.setattr(ceilings.rates, name, lambda device: 1e9)
    monkeypatch.setattr(ceilings.rates, "matmuls", lambda device: {"fp32": lambda: 4e8})
    said: list[str] = []
    found = ceilings.measure("cpu", say=said.append)
    assert "measuring products in fp32" in said
    assert "measuring copies in memory" in said
    # four digits of a slow one, not a zero
    assert found.matmul_tflops == {"fp32": 0.0004}
    said.clear()
    ceilings.measure("cpu", say=said.append)
    assert said == []
