"""Benchmarks that need a GPU, dry: kernels and clocks are stood in for, and rows follow from what they give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rooftile.exact.cases import Case
from rooftile_lab.bench.ladder import RUNGS
from rooftile_lab.bench.suites import ladder, ladder_counters
from tests.bench.conftest import Ticks
from tests.bench.session import SESSION

SMALL = Case(name="small", tags=frozenset(), B=1, T=16, S=16, H=2, Hk=2, dim=16)


def quiet(words: str) -> None:
    """No progress."""


# the ladder


@pytest.fixture
def small_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "CASES", {"d128-full-4k": SMALL})
    monkeypatch.setattr(ladder, "clock_for", lambda device: Ticks())


def test_each_rung_has_a_row(small_ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ladder.rungs

    def runnable(case, inputs):
        return {"standard": whole(case, inputs)["standard"]}

    pytest.importorskip("triton")
    assert tuple(whole(SMALL, SMALL.inputs())) == RUNGS
    monkeypatch.setattr(ladder, "rungs", runnable)
    (row,) = ladder.measure(SESSION, ["d128-full-4k"], quiet)
    assert (row.suite, row.case, row.backend, row.median_us) == ("ladder", "d128-full-4k", "standard", 5.5)


def test_a_rung_that_is_wrong_is_not_timed(small_ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "rungs", lambda case, inputs: {"zeros": lambda: torch.zeros_like(inputs.tensors[0])})
    with pytest.raises(ValueError, match="differs from the definition by"):
        list(ladder.measure(SESSION, ["d128-full-4k"], quiet))


def test_counters_are_means_by_time_over_the_kernels_of_a_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def kernels(metrics, module, *arguments, clocks):
        asked.append((module, *arguments))
        long, short = (dict.fromkeys(metrics, value) for value in (30.0, 10.0))
        return [long | {ladder_counters.TIME: 3000.0}, short | {ladder_counters.TIME: 1000.0}]

    monkeypatch.setattr(ladder_counters.ncu, "kernels", kernels)
    monkeypatch.setattr(ladder_counters.shutil, "which", lambda name: name)
    (row,) = ladder_counters.measure(SESSION, ["causal-hopper"], quiet)
    # the suite `ladder` runs one rung if it is a program
    assert asked == [("rooftile_lab.bench.suites.ladder", "d128-causal-4k", "hopper")]
    assert (row.suite, row.case, row.backend) == ("ladder-counters", "d128-causal-4k", "hopper")
    assert (row.measures["kernels"], row.measures["kernels_us"], row.measures["tensor_percent"]) == (2, 4.0, 25.0)
    assert sum(name.startswith("stall_") for name in row.measures) == 4


def test_without_ncu_a_rung_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder_counters.shutil, "which", lambda name: None)
    (row,) = ladder_counters.measure(SESSION, ["full-plain"], quiet)
    assert (row.reason, row.measures) == ("refused: Nsight Compute (ncu) is not on the PATH", {})


# the counters of a diagnosis


def test_slopes_cancel_what_each_kernel_moves_besides() -> None:
    from rooftile_lab.bench.diagnosis.counters import OPERATORS, measures_of

    counted = [
        {"bytes": 100 * n, "dram_bytes": 110 * n + 7, "l2_bytes": 200 * n + 9, "tensor_flops": 8 * n, "flops": 4 * n}
        for n in (1, 2, 4)
    ]
    found = measures_of(OPERATORS["copy"], counted)
    assert (found["predicted_bytes"], found["dram_bytes"], found["tensor_flops_ratio"]) == (400.0, 447.0, 2.0)
    assert (found["dram_slope_ratio"], found["l2_slope_ratio"]) == (pytest.approx(1.1), pytest.approx(2.0))


def test_an_operator_without_counters_has_a_reason() -> None:
    from rooftile_lab.bench.suites import diagnosis

    (row,) = diagnosis.measure(SESSION, ["counters-copy"], quiet)
    assert (row.suite, row.case, row.reason) == ("diagnosis", "counters-copy", "refused: Nsight Compute counts on a GPU")


# tiles


def test_tiles_that_are_wrong_or_fail_have_a_reason_and_the_others_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from rooftile_lab.bench import tiles

    def start(tile, programs, x, ordered, parts, bias, product, o) -> None:
        # two blocks of rows give a wrong product
        o.copy_(due[0] * (2 if tile.BLOCKS_N == 2 else 1))

    class Clock:
        """A variant with more programs is faster."""

        def samples(self, work) -> list[float]:
            return [2000.0] if not hasattr(work, "args") else [1000.0 - work.args[0].programs]

    due: list[torch.Tensor] = []
    whole = tiles.Layers.__init__

    def made(self, *arguments) -> None:
        whole(self, *arguments)
        due[:] = [self.due]

    monkeypatch.setattr(tiles.Layers, "__init__", made)
    for name, value in {"DEVICE": "cpu", "PRODUCTS": {"qkv": (512, 512)}, "WALKED": 1, "ReplayClock": Clock}.items():
        monkeypatch.setattr(tiles, name, value)
    monkeypatch.setattr(tiles, "compile_all", lambda formats, rows, say: None)
    monkeypatch.setattr(tiles.launch, "processors_of", lambda device: 132)
    monkeypatch.setattr(tiles.launch, "start_widened", start)
    rows = list(tiles.measure(SESSION, ["int4"], [16], ["qkv"], quiet))
    timed = [row for row in rows if not row.reason]
    assert timed
    assert {(row.suite, row.case) for row in rows} == {("tiles", "8b-int4-qkv-r16")}
    # a GPU's kernel puts x in order
    assert {row.reason.partition(":")[0] for row in rows if row.reason} == {"wrong", "failed"}
    assert all("ordered before" in row.backend for row in rows if row.reason.startswith("failed"))
    assert [row.settings["programs"] for row in timed] == sorted((row.settings["programs"] for row in timed), reverse=True)
    # two layers share a time
    assert timed[0].median_us == pytest.approx((1000 - timed[0].settings["programs"]) / 2)
    assert timed[0].measures["of_bf16_ratio"] == pytest.approx(2 * timed[0].median_us / 2000)


# cuSPARSELt


def test_algorithms_are_sorted_and_wrong_ones_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.weights.two_four.product.cusparselt import Algorithm
    from rooftile_lab.bench import cusparselt as bench

    found = [Algorithm(0, False), Algorithm(1, False), Algorithm(2, True)]
    due = torch.ones(4, 4)

    class Clock:
        def __init__(self, times: int) -> None:
            self.made: list[object] = []

        def samples(self, work) -> list[float]:
            return [10.0] if not hasattr(work, "args") else [[8.0, 0.0, 5.0][work.args[2].number]]

    monkeypatch.setattr(bench, "case_of", lambda *sizes: bench.Case(due, due, lambda: due))
    monkeypatch.setattr(bench, "algorithms_of", lambda name: found)
    monkeypatch.setattr(bench, "multiply", lambda case, name, one: torch.zeros(4, 4) if one.number == 1 else due)
    monkeypatch.setattr(bench, "ReplayClock", Clock)
    monkeypatch.setattr(bench.torch.backends, "cusparselt", SimpleNamespace(version=lambda: 800))
    rows = list(bench.measure(SESSION, ["bf16"], [256], quiet))
    assert [(row.backend, row.median_us, row.reason) for row in rows] == [
        ("algorithm-2-transposed", 5.0, ""), ("algorithm-0", 8.0, ""), ("algorithm-1", None, "its results are wrong"),
    ]  # fmt: skip
    assert {(row.suite, row.case) for row in rows} == {("cusparselt", "8b-bf16-r256")}
    assert rows[0].measures == {"of_dense_ratio": 0.5}
