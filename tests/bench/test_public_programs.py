"""The programs after public ones: each runs, the truth follows from made-up measurements, and the page says what the rows say."""

from __future__ import annotations

import functools
import json
import runpy
import socket
import sys
import types
from dataclasses import replace

import pytest
import torch

from rooftile.diagnosis.counts import counters
from rooftile.errors import InvalidInput, Unsupported
from rooftile_lab.bench.diagnosis import public_rows, trial
from rooftile_lab.bench.diagnosis.cases import CASES, FOLDER
from rooftile_lab.bench.diagnosis.public.course import Course
from rooftile_lab.bench.diagnosis.truth import Truth, agrees
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.suites import SUITES
from rooftile_lab.cli.bench_suites import diagnosis as command
from scripts.agreement import agreement
from tests.bench.session import SESSION


def times_of(monkeypatch, capsys, path, arguments) -> dict[str, float]:
    """Runs a script in this process, as rank 0 of 1, and reads the line that it prints last."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    # Inductor takes a minute, and other tests run what it generates
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    runpy.run_path(str(path), run_name="__main__")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
@pytest.mark.parametrize("size", ["toy", "tiny"])
def test_a_program_runs(monkeypatch, capsys, case, size) -> None:
    times = times_of(monkeypatch, capsys, case.path, [*case.arguments, "--size", size, "--steps", "2"])
    assert times["wall_us"] > 0
    assert times["cpu_us"] > 0


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.without], ids=lambda case: case.name)
def test_a_program_runs_without_its_part(monkeypatch, capsys, case) -> None:
    left_out = ["--without", case.without, "--steps", "2", "--size", "tiny"]
    assert times_of(monkeypatch, capsys, case.path, [*case.arguments, *left_out])["wall_us"] > 0


def test_twenty_cases_name_every_script() -> None:
    helpers = {"__init__", "course", "product"}
    assert len(CASES) == 20
    assert {case.script for case in CASES.values()} | helpers == {path.stem for path in FOLDER.glob("*.py")}
    assert all(bool(case.without) == bool(case.part) for case in CASES.values())


# a step of 100 µs; products that take 4 times as long
WHOLE = Truth(whole_us=100.0, tiny_us=5.0, arithmetic_us=100.0, factor=4.0)


@pytest.mark.parametrize(
    ("truth", "cause"),
    [
        # nothing but the size matters
        (WHOLE, "memory"),
        (replace(WHOLE, arithmetic_us=100 + 3 * 80), "compute"),
        # faster products, as on a GPU
        (replace(WHOLE, arithmetic_us=100 - 0.75 * 80, factor=0.25), "compute"),
        (replace(WHOLE, tiny_us=90.0), "overhead"),
        (replace(WHOLE, part="input", without_us=30.0, arithmetic_us=30.0), "input"),
        (replace(WHOLE, part="communication", without_us=30.0, arithmetic_us=30.0), "communication"),
        # a part that takes no time; noise may make the run without it the longer one
        (replace(WHOLE, part="host", without_us=104.0), "memory"),
        # noise that is larger than any answer
        (replace(WHOLE, part="host", without_us=120.0), "unclear"),
        # products take half
        (replace(WHOLE, arithmetic_us=100 + 3 * 47), "unclear"),
        # products were not made slower, or the experiment was not made
        (replace(WHOLE, factor=1.2), "unclear"),
        (replace(WHOLE, arithmetic_us=None), "unclear"),
        (replace(WHOLE, arithmetic_us=None, tiny_us=80.0), "overhead"),
        # a step that grows by more than its products explain has not more than all of its time in them
        (replace(WHOLE, arithmetic_us=1000.0), "compute"),
    ],
)
def test_the_main_cause(truth, cause) -> None:
    assert truth.cause == cause
    assert sum(truth.shares.values()) == pytest.approx(1.0)
    assert min(truth.shares.values()) >= 0


def test_a_verdict_is_right_wrong_or_not_told() -> None:
    assert agrees("memory", "memory") is True
    assert agrees("compute", "memory") is False
    assert agrees(None, "memory") is False
    assert agrees("memory", "unclear") is None
    assert agrees("host", "input") is True
    assert agrees("host", "communication") is False


def made(case: str, *, truth: str, verdict: str, **measures: float) -> Row:
    return Row(
        suite="diagnosis", case=case, backend="rooftile", phase="step-toy", problem="nanoGPT", median_us=100.0, device="d",
        arch="cpu", driver="", torch="2", triton="3", commit="abc", date="2026-01-02", copy_gbs=1.0, matmul_tflops=1.0,
        settings={"truth": truth, "verdict": verdict, "load": 2.5},
        measures={
            "diagnosing_s": 31.0, "program_s": 7.0, "judged_percent": 88.0, "truth_memory_percent": 71.0,
            "verdict_memory_percent": 66.0,
        } | measures,
    )  # fmt: skip


def test_the_page_has_a_line_for_each_program_and_counts_them() -> None:
    prices = {"compile_predicted_us": 20.0, "compile_measured_us": 25.0}
    rows = [
        made("nanogpt", truth="memory", verdict="memory", **prices),
        made("graph", truth="memory", verdict="overhead"),
        made("unet", truth="unclear", verdict="balanced"),
        made("loop", truth="memory", verdict="memory"),
    ]
    page = agreement(rows)
    assert "of 3 programs the main cause is right in 1 and wrong in 1; other experiments do not tell it in 1." in page
    line = next(line for line in page.splitlines() if "| nanogpt |" in line)
    for words in ("| memory 66 % | memory | yes |", "memory 71 %", "88 %", "31 s / 7 s", "compile 20 %, 25 %"):
        assert words in line
    assert "**no**" in next(line for line in page.splitlines() if "| graph |" in line)
    assert "loop" not in page
    failed = replace(rows[0], settings={"truth": "memory"}, reason="failed in diagnose: exit code 1", measures={}, median_us=None)
    assert "failed in diagnose: exit code 1 | memory | **no**" in agreement([failed])


def test_a_devices_time_hides_the_hosts() -> None:
    """A step of 100 µs on a GPU whose host alone takes 60 is the device's; where it takes 90 the host holds it up."""
    times = {"whole_us": 100.0, "arithmetic_us": 130.0, "factor": 2.0, "overlaps": True}
    assert Truth(tiny_us=60.0, **times).shares == {"overhead": 0.0, "compute": 0.3, "memory": 0.7}
    assert Truth(tiny_us=90.0, **times).cause == "overhead"
    assert Truth(tiny_us=60.0, **times | {"overlaps": False}).cause == "overhead"


def test_kernels_are_told_apart_by_their_counters(monkeypatch) -> None:
    names = (counters.TIME, *trial.MEMORY.values(), *trial.SM)
    # main memory, L2, instructions, tensor cores
    kernels = [(30e3, 80, 20, 10, 0), (20e3, 10, 20, 15, 90), (10e3, 20, 20, 10, 0), (5e3, 10, 70, 20, 0)]
    asked: list[object] = []

    def read(metrics, module, *arguments, clocks):
        asked.extend([module, *arguments])
        return [dict(zip(names, (float(value) for value in kernel), strict=True)) for kernel in kernels]

    monkeypatch.setattr(trial.ncu, "kernels", read)
    found = trial.counted(CASES["trainer-lora"], "real")
    assert found == {"memory": 35.0, "compute": 20.0, "unclear": 10.0}
    assert asked == ["rooftile_lab.bench.diagnosis.public.trainer", "--way", "lora", "--size", "real", "--counted"]
    # the time without a kernel is the host's
    truth = Truth(whole_us=100.0, counted_us=found)
    assert truth.shares == pytest.approx({"memory": 0.35, "compute": 0.2, "unclear": 0.1, "overhead": 0.35})
    slower = Truth(whole_us=52.0, counted_us=found)
    assert slower.shares == pytest.approx({"memory": 35 / 65, "compute": 20 / 65, "unclear": 10 / 65, "overhead": 0.0})
    without = Truth(whole_us=200.0, without_us=100.0, part="input", counted_us=found)
    assert (without.shares["input"], without.cause) == (0.5, "input")

    def fails(*unused, **named):
        raise RuntimeError("ncu failed: no rights")

    monkeypatch.setattr(trial.ncu, "kernels", fails)
    with pytest.raises(Unsupported, match="no rights"):
        trial.counted(CASES["graph"], "real")


def test_one_step_is_shown_to_a_profiler(monkeypatch) -> None:
    shown: list[str] = []
    profiler = types.SimpleNamespace(
        cudaProfilerStart=lambda: shown.append("start"), cudaProfilerStop=lambda: shown.append("stop")
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: profiler)
    monkeypatch.setattr(sys, "argv", ["x.py", "--counted"])
    course = Course()
    while course.goes_on():
        shown.append("step")
    assert shown == ["step"] * 3 + ["start", "step", "stop"]


def test_verdicts_are_compared_with_what_counters_saw(monkeypatch) -> None:
    def op(name: str, bound: str, us: float, unit: str = "") -> types.SimpleNamespace:
        # a row of the table has the bytes of all its calls, and a counted one of one call
        return types.SimpleNamespace(module="m", op=name, phase="forward", bytes=24, calls=3, bound=bound, time_us=us, unit=unit)

    def row(name: str, dram: float, sm: float) -> dict[str, object]:
        return {
            "module": "m",
            "op": name,
            "phase": "forward",
            "bytes": 8,
            "dram_percent": dram,
            "l2_percent": 5.0,
            "sm_percent": sm,
        }

    ops = [op("mm", "compute", 60.0), op("add", "compute", 20.0), op("mul", "balanced", 50.0), op("neg", "memory", 20.0)]
    ops += [op("copy", "memory", 40.0, "addresses")]
    rows = [
        row("copy", 20.0, 75.0),
        row("mm", 20.0, 90.0),
        row("add", 80.0, 20.0),
        row("mul", 90.0, 10.0),
        row("neg", 30.0, 20.0),
        row("sin", 90.0, 1.0),
    ]
    found = types.SimpleNamespace(ops=ops, counters=rows)
    assert public_rows.counted(found) == {"counters_agree_percent": pytest.approx(100 * 100 / 120), "counted_operators": 3.0}
    assert public_rows.counted(types.SimpleNamespace(ops=ops, counters=())) == {}
    step = types.SimpleNamespace(time_us=200.0, idle_us={"host": 20.0, "copy": 10.0})
    assert public_rows.adds_up(types.SimpleNamespace(ops=ops, step=step)) == 110.0


def test_a_program_that_fails_is_a_row_with_its_reason(monkeypatch) -> None:
    def fails(*unused: object) -> None:
        raise Unsupported("exit code 1: no words")

    case, say = CASES["graph"], lambda words: None
    monkeypatch.setattr(trial, "truth_of", lambda *unused: (WHOLE, trial.Timed(100.0, 90.0, 3.0)))
    monkeypatch.setattr(trial, "diagnosed", fails)
    row = public_rows.public_row(SESSION, case, say, "toy", trial.Settings(1.0))
    assert (row.reason, row.settings["truth"]) == ("failed in diagnose: exit code 1: no words", "memory")
    assert row.measures["tiny_us"] == 5.0
    monkeypatch.setattr(trial, "truth_of", fails)
    assert public_rows.public_row(SESSION, case, say, "toy", trial.Settings(1.0)).reason == "failed alone: exit code 1: no words"


def test_a_script_in_a_process_of_its_own() -> None:
    path = FOLDER / "product.py"
    found = trial.script_run(path, ["--size", "tiny", "--steps", "4"])
    assert 0 < found.wall_us < 1e6 * found.process_s
    with pytest.raises(Unsupported, match=r"exit code 2: .*unrecognized arguments: --sice"):
        trial.script_run(path, ["--sice", "tiny"])


def test_public_cases_run_only_when_they_are_named() -> None:
    suite = SUITES["diagnosis"]
    assert not set(CASES) & set(suite.chosen("cpu"))
    assert suite.chosen("cpu", ["nanogpt"]) == ["nanogpt"]
    with pytest.raises(InvalidInput, match="--size is 'big'; give toy or real"):
        command(case=["graph"], size="big", device="cpu")
