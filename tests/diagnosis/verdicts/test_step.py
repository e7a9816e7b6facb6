"""The verdict on a step: shares of its time, overhead by a graph or by fixed parts, and a doubled batch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.diagnosis.verdicts.step import StepEvidence, classify_step
from tests.diagnosis.machine import Machine, Work, finding

GPU = Machine(flops_per_us=5e8, bytes_per_us=4e6, cache_bytes_per_us=1.2e7, fixed_us=2.0, launch_us=5.0, device="cuda")
CPU = Machine(flops_per_us=1e5, bytes_per_us=1e4, cache_bytes_per_us=1e5, fixed_us=5.0)


def kernels(memory_us: float, compute_us: float) -> list[Finding]:
    found = [
        finding(GPU, Work(bytes=memory_us * GPU.bytes_per_us, flops=1e3)),
        finding(GPU, Work(bytes=1e3, flops=compute_us * GPU.flops_per_us), index=1),
    ]
    assert [f.verdict.bound for f in found] == ["memory", "compute"]
    return found


def test_the_issues_example() -> None:
    """A step of 53.7 ms that takes 8.1 as a graph is 85 % overhead; memory and compute share the rest by their time."""
    verdict = classify_step(StepEvidence(time_us=53700, graph_us=8100, double_batch_us=54000), kernels(5000, 2500))
    assert (verdict.bound, verdict.confidence) == ("overhead", "confirmed")
    assert verdict.overhead_share == pytest.approx(1 - 8.1 / 53.7)
    assert sum(verdict.shares.values()) == pytest.approx(1)
    assert list(verdict.shares) == ["overhead", "memory", "compute"]
    assert verdict.shares["memory"] / verdict.shares["compute"] == pytest.approx(2, rel=0.01)


def test_a_graph_that_saves_nothing_leaves_the_kernels() -> None:
    verdict = classify_step(StepEvidence(time_us=10000, graph_us=9900, double_batch_us=19000), kernels(2000, 7900))
    assert (verdict.bound, verdict.confidence, verdict.notes) == ("compute", "confirmed", ())
    # a graph may even be slower: no share is negative
    slower = classify_step(StepEvidence(time_us=10000, graph_us=11000), kernels(2000, 7900))
    assert slower.overhead_share == 0
    assert classify_step(StepEvidence(time_us=10000, graph_us=9900), kernels(7000, 2900)).bound == "memory"


def test_a_doubled_batch_decides_where_there_is_no_graph() -> None:
    flat = StepEvidence(time_us=1000, double_batch_us=1100, why_not={"graph": "data-dependent"})
    assert classify_step(flat, kernels(200, 100)).bound == "overhead"
    assert classify_step(replace(flat, double_batch_us=1101), kernels(200, 100)).bound == "memory"
    # ... and near half, where there is one
    assert classify_step(replace(flat, graph_us=600), kernels(400, 100)).bound == "overhead"
    assert classify_step(replace(flat, graph_us=600, double_batch_us=1500), kernels(400, 100)).bound == "balanced"


def test_weights_that_all_examples_share_are_not_overhead() -> None:
    """Decoding with batch 1: twice the batch costs nothing, because the time goes into the weights."""
    verdict = classify_step(StepEvidence(time_us=1000, graph_us=960, double_batch_us=1010), kernels(900, 30))
    assert verdict.bound == "memory"
    assert "1.01 times as long" in verdict.notes[0]
    assert "4 % is overhead" in verdict.notes[0]


def test_operators_that_grow_with_the_batch_contradict() -> None:
    verdict = classify_step(StepEvidence(time_us=1000, graph_us=100, double_batch_us=2000), kernels(50, 50))
    assert (verdict.bound, verdict.confidence) == ("overhead", "contradicted")
    assert "2.00 times as long" in verdict.notes[0]


def test_a_cpus_overhead_is_its_operators_fixed_parts_and_the_gaps() -> None:
    tiny = finding(CPU, Work(bytes=100, flops=100), calls=2000)
    assert tiny.verdict.bound == "overhead"
    verdict = classify_step(StepEvidence(time_us=15000, idle_us={"host": 4900}), [tiny])
    assert verdict.bound == "overhead"
    assert verdict.overhead_share == pytest.approx((2000 * 5 + 4900) / 15000)
    large = finding(CPU, Work(bytes=1e8, flops=100))
    verdict = classify_step(StepEvidence(time_us=10100, idle_us={"host": 50}), [large])
    assert verdict.bound == "memory"
    assert verdict.shares["overhead"] == pytest.approx(55 / 10100)


def test_fixed_parts_are_not_counted_twice() -> None:
    """40 % of each small operator is its call: that is overhead, and only the rest is bound by memory."""
    small = finding(CPU, Work(bytes=7.5 * CPU.bytes_per_us, flops=100), calls=100)
    large = finding(CPU, Work(bytes=1e3, flops=495 * CPU.flops_per_us), index=1)
    assert (small.verdict.bound, large.verdict.bound) == ("memory", "compute")
    shares = classify_step(StepEvidence(time_us=1750), [small, large]).shares
    assert shares["overhead"] == pytest.approx(505 / 1750)
    assert shares["memory"] == pytest.approx(750 / 1750)
    assert shares["compute"] == pytest.approx(495 / 1750)


def test_waits_are_the_hosts_not_overhead() -> None:
    """A sleep lies in the gaps of the host, but no launch does."""
    step = StepEvidence(time_us=10000, idle_us={"host": 7000, "sync": 0.0}, waiting_us=6900)
    verdict = classify_step(step, kernels(2000, 900))
    assert verdict.bound == "host"
    assert verdict.shares["host"] == pytest.approx(0.69)
    assert verdict.overhead_share == pytest.approx(0.01)
    assert classify_step(replace(step, idle_us={"sync": 6000}, waiting_us=0), kernels(2000, 1900)).bound == "host"


def test_the_weakest_verdicts_decide_the_confidence() -> None:
    step = StepEvidence(time_us=1000, graph_us=1000)
    sure, other = kernels(900, 100)
    assert classify_step(step, [sure]).confidence == "confirmed"
    guessed = replace(other, time_us=300, verdict=replace(other.verdict, confidence="modelled"))
    assert classify_step(step, [sure, guessed]).confidence == "modelled"
    measured = replace(guessed, verdict=replace(other.verdict, confidence="measured"))
    assert classify_step(step, [sure, measured]).confidence == "measured"


def test_nothing_known_is_said_so() -> None:
    verdict = classify_step(StepEvidence(time_us=1000), [])
    assert (verdict.bound, verdict.overhead_share, verdict.shares) == (None, None, {"unknown": 1.0})
    assert verdict.confidence == "modelled"


def test_two_bounds_of_like_size_are_balanced() -> None:
    step = StepEvidence(time_us=1000, graph_us=700)
    verdict = classify_step(step, kernels(400, 300))
    assert verdict.shares["memory"] < 0.5
    assert verdict.bound == "balanced"


def test_a_cpus_operator_that_is_overhead_stays_so() -> None:
    """An operator that is a Python loop inside is slow at every size: its own time is overhead, not unknown."""
    loop = finding(CPU, Work(bytes=1e3, flops=1e3, latency_us=900.0))
    assert loop.verdict.bound == "overhead"
    step = StepEvidence(time_us=1000.0)
    # the experiments say that nearly nothing of it is fixed
    loop = replace(loop, time_us=1000.0, evidence=replace(loop.evidence, fixed_us=5.0))  # type: ignore[type-var]
    verdict = classify_step(step, [loop])
    assert verdict.shares == pytest.approx({"overhead": 1.0})
    assert verdict.bound == "overhead"
