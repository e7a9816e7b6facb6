"""Operators whose bound is known, measured on a simulated clock; test_this_clock.py measures some on the machine's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import rooftile as rt
from rooftile.diagnosis.experiments.call import RepeatableCall
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.measure import alone, with_intensity
from rooftile.diagnosis.verdicts.findings import Finding, find
from tests.diagnosis.operators import sample
from tests.diagnosis.simulated import CACHE_BYTES, DRAM_BYTES, FIXED_US, FLOPS, simulate

aten = torch.ops.aten
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def product(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> Program:
    return aten.mm.default, (torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype))


def simulated(patch: pytest.MonkeyPatch, function: Callable[..., Any], args: tuple[Any, ...]) -> Finding:
    """The finding of one call."""
    dtype = next(x.dtype for x in RepeatableCall(function, args).tensors if x.is_floating_point())
    timer, roofs = simulate(patch, dtype)
    given = sample(function, *args)
    counted = timer.counted(RepeatableCall(function, args))
    operation = replace(given.operation, flops=counted.flops, special=counted.special, bytes=counted.bytes)
    given = replace(given, operation=operation)
    return find(operation, roofs, with_intensity(alone(given, timer, 60.0), given, timer, Deadline(60.0)))


@pytest.mark.usefixtures("fma_200")
@pytest.mark.parametrize(
    ("make", "bound", "unit"),
    [
        (lambda: (aten.add.Tensor, (torch.randn(1 << 18), 1.5)), "memory", "DRAM"),
        (lambda: (aten.mul_.Tensor, (torch.randn(1 << 18), 0.9)), "memory", "DRAM"),
        (lambda: (aten.clone.default, (torch.randn(1 << 18),)), "memory", "DRAM"),
        (lambda: (aten._foreach_mul_.Scalar, ([torch.randn(1 << 16) for _ in range(32)], 0.999)), "memory", "DRAM"),
        (lambda: (aten.embedding.default, (torch.randn(4096, 256), torch.randint(4096, (2048,)))), "memory", "DRAM"),
        (lambda: product(700, 4, 700), "memory", "DRAM"),
        (lambda: product(4, 1024, 1024), "memory", "DRAM"),
        (lambda: product(256, 256, 256), "compute", "fp32"),
        (lambda: product(256, 256, 256, torch.float64), "compute", "fp64"),
        (lambda: (aten.lgamma.default, (torch.rand(1 << 18) + 1,)), "compute", "special"),
        (lambda: (torch.ops.rooftile_test.fma_200.default, (torch.randn(1 << 18),)), "compute", "fp32"),
        (lambda: (aten.add.Tensor, (torch.ones(64), 1.5)), "overhead", None),
    ],
    ids=["addition", "in place", "copy", "lists", "gather", "product, K = 4", "product of 4 rows", "product", "fp64 product",
         "lgamma", "200 multiply-adds", "tiny"],
)  # fmt: skip
def test_the_bound_and_its_unit(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Program], bound: str, unit: str | None
) -> None:
    found = simulated(monkeypatch, *make())
    assert (found.verdict.bound, found.verdict.unit) == (bound, unit), found
    assert found.verdict.confidence in ("measured", "confirmed"), found
    assert found.evidence is not None
    assert found.evidence.fixed_us == pytest.approx(FIXED_US, rel=0.05)


@pytest.mark.usefixtures("fma_200")
def test_added_arithmetic_is_seen_from_the_machines_balance_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = simulated(monkeypatch, aten.sum.dim_IntList, (torch.randn(64, 1 << 12), [1])).evidence
    computes = simulated(monkeypatch, torch.ops.rooftile_test.fma_200.default, (torch.randn(1 << 18),)).evidence
    for found in (reads, computes):
        assert found is not None
        assert found.why_not == {}
        assert found.added_us[0] == 0
        assert list(found.added_us) == sorted(found.added_us)
        assert len(found.swept_us) == len(found.added_us) > 4
    assert reads.slope == pytest.approx(0, abs=1e-6)
    assert reads.knee_flops_per_byte == pytest.approx(FLOPS[torch.float32] / DRAM_BYTES, rel=0.05)
    assert reads.gain == pytest.approx(1 - DRAM_BYTES / CACHE_BYTES, rel=0.05)
    assert computes.slope == pytest.approx(1, rel=0.05)
    assert computes.gain == pytest.approx(0, abs=0.05)


def test_the_slope_of_a_product_counts_its_own_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, slope in (((256, 256, 256), 1), ((4, 1024, 1024), 0)):
        found = simulated(monkeypatch, *product(*sizes)).evidence
        assert found is not None
        assert found.slope == pytest.approx(slope, abs=0.05)
        assert len(found.added_us) >= 3


def test_in_context_times_choose_cold_or_warm_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1 << 12)
    timer, _ = simulate(monkeypatch)
    given = sample(aten.add.Tensor, x, 1.0)
    cold = alone(given, timer, 9.0, in_context_us=1e6)
    warm = alone(given, timer, 9.0, in_context_us=0.1)
    assert cold.time_us == pytest.approx(2 * x.nbytes / DRAM_BYTES + FIXED_US)
    assert warm.time_us == pytest.approx(2 * x.nbytes / CACHE_BYTES + FIXED_US)
    assert (warm.in_context_us, cold.in_context_us) == (0.1, 1e6)


def test_an_operator_that_writes_to_its_argument_has_its_experiments() -> None:
    x = torch.zeros(1 << 20)
    op = max(rt.diagnose(lambda: x.add_(1.0), budget=3).ops, key=lambda op: op.time_us)
    assert op.op == "aten::add_"
    assert op.experiments["cache"]["gain"] is not None
    assert op.experiments["size"]["fixed_us"] is not None
