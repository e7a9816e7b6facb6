"""Verdicts on a simulated machine, where the truth is known, and on evidence by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.machine import roofs_of
from rooftile.diagnosis.verdicts.classify import classify, settled
from rooftile.diagnosis.verdicts.roofs import NEAR_FIXED, model
from rooftile.hardware.ceilings import Ceilings
from rooftile.runtime import devices
from tests.diagnosis.machine import Machine, Work, operation

# outside this margin a verdict is due: the bound takes so many times as long as each of the others
MARGIN = 2.5

rates = st.floats(1e3, 1e9)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    bandwidth = draw(rates)
    return Machine(
        flops_per_us=bandwidth * draw(st.floats(0.5, 300)),
        bytes_per_us=bandwidth,
        cache_bytes_per_us=bandwidth * draw(st.floats(3, 20)),
        fixed_us=draw(st.floats(0.5, 50)),
        launch_us=draw(st.sampled_from((0.0, 5.0))),
        device=draw(st.sampled_from(("cpu", "cuda"))),
        noise=0.1,
    )


def work(machine: Machine, bound: str, ratios: tuple[float, float]) -> Work:
    """Returns an operator of that bound: each of the two others takes 1 / (MARGIN * ratio) of its time, or less."""
    first, second = (1 / (MARGIN * ratio) for ratio in ratios)
    fixed = machine.fixed_us
    # the fixed part is the machine's, so traffic and arithmetic are sized by it
    if bound == "memory":
        return Work(bytes=fixed / first * machine.bytes_per_us, flops=fixed / first * second * machine.flops_per_us)
    if bound == "compute":
        return Work(bytes=fixed / first * second * machine.bytes_per_us, flops=fixed / first * machine.flops_per_us)
    return Work(bytes=fixed * first * machine.bytes_per_us, flops=fixed * second * machine.flops_per_us)


def truth(machine: Machine, bound: str, time_us: float) -> str:
    if bound != "fixed":
        return bound
    return "overhead" if machine.device == "cpu" or time_us <= machine.launch_us else "latency"


seeds = st.integers(0, 2**32)
ratios = st.tuples(st.floats(1, 50), st.floats(1, 50))


@pytest.mark.parametrize("bound", ["memory", "compute", "fixed"])
def test_verdicts_outside_the_margin_are_right_in_99_of_100_cases(bound: str) -> None:
    seen: list[bool] = []
    wrong_and_confirmed: list[object] = []

    @given(machines(), ratios, seeds)
    def check(machine: Machine, ratio: tuple[float, float], seed: int) -> None:
        its, rng = work(machine, bound, ratio), random.Random(seed)
        for _ in range(5):
            evidence = machine.evidence(its, rng)
            verdict = classify(operation(its, device=machine.device), machine.roofs(), evidence)
            right = verdict.bound == truth(machine, bound, evidence.time_us)
            seen.append(right)
            if verdict.confidence == "confirmed" and not right:
                wrong_and_confirmed.append((machine, its, verdict))

    check()
    assert len(seen) >= 300
    assert sum(seen) >= 0.99 * len(seen), f"{len(seen) - sum(seen)} of {len(seen)} verdicts are wrong"
    assert wrong_and_confirmed == []


def test_balanced_inside_the_margin() -> None:
    """Arithmetic of three quarters of the memory's time: s = 1/2 and g = 1/4."""
    rng = random.Random(1)
    machine = Machine(flops_per_us=1e6, bytes_per_us=1e5, cache_bytes_per_us=1e6, fixed_us=0.01, noise=0.1)
    its = Work(bytes=1e8, flops=0.75e9)
    verdicts = [classify(operation(its), machine.roofs(), machine.evidence(its, rng)) for _ in range(300)]
    assert sum(v.bound == "balanced" for v in verdicts) >= 0.9 * len(verdicts)
    assert all(v.bound in ("balanced", "memory", "compute") for v in verdicts)
    assert all("slope" in v.confirmed_by and "gain" in v.confirmed_by for v in verdicts)


@given(machines(), st.sampled_from(("memory", "compute")), ratios, st.floats(0.05, 20), seeds)
def test_a_wrong_model_never_makes_a_wrong_verdict_confirmed(
    machine: Machine, bound: str, ratio: tuple[float, float], error: float, seed: int
) -> None:
    """The ceilings are off by a factor, so the model may say anything: the experiments win."""
    its = work(machine, bound, ratio)
    roofs = machine.roofs(bytes_per_s=machine.bytes_per_us * 1e6 * error)
    verdict = classify(operation(its, device=machine.device), roofs, machine.evidence(its, random.Random(seed)))
    assert verdict.bound == bound or verdict.confidence != "confirmed"
    if verdict.bound == bound and {verdict.bound, verdict.modelled_bound} == {"memory", "compute"}:
        assert verdict.confidence == "contradicted"
        assert f"model says {verdict.modelled_bound}" in verdict.confirmed_by


@given(machines(), st.floats(0.1, 10), st.floats(0.01, 10), st.floats(0, 5), seeds)
def test_no_verdict_on_either_roof_is_ever_confirmed_and_wrong(
    machine: Machine, memory: float, compute: float, latency: float, seed: int
) -> None:
    """Anywhere, inside the margin too: a confirmed bound is at least as slow as the other roof."""
    fixed = machine.fixed_us
    its = Work(
        bytes=memory * fixed * machine.bytes_per_us,
        flops=compute * fixed * machine.flops_per_us,
        latency_us=latency * fixed,
    )
    verdict = classify(operation(its, device=machine.device), machine.roofs(), machine.evidence(its, random.Random(seed)))
    if verdict.confidence == "confirmed":
        parts = {"memory": memory, "compute": compute, "overhead": 1 + latency, "latency": 1 + latency}
        parts["balanced"] = 1.5 * min(memory, compute)
        assert parts[verdict.bound or ""] >= max(memory, compute) * 0.8


def by_hand(**measured: float) -> Evidence:
    return Evidence(**{"time_us": 100.0, "spread_us": 1.0, "in_context_us": None, "why_not": {}} | measured)  # type: ignore[arg-type]


GPU = Machine(flops_per_us=1e6, bytes_per_us=1e6, cache_bytes_per_us=4e6, fixed_us=2.0, launch_us=5.0, device="cuda")
MEMORY, COMPUTE = Work(bytes=9e7, flops=1e6), Work(bytes=1e6, flops=9e7)


@pytest.mark.parametrize(
    ("its", "measured", "bound", "unit", "confidence"),
    [
        (MEMORY, {"slope": 1 / 3, "gain": 0.3}, "memory", "HBM", "measured"),  # on the threshold: right, and never confirmed
        (MEMORY, {"slope": 0.05, "gain": 0.6}, "memory", "HBM", "confirmed"),
        # between: the counts leave no doubt
        (MEMORY, {"slope": 0.34, "gain": 0.6}, "memory", "HBM", "measured"),
        (Work(bytes=7e7, flops=1e6), {"slope": 0.34, "gain": 0.6}, "balanced", None, "measured"),
        (Work(bytes=7e7, flops=1e6), {"slope": 0.05, "gain": 0.29}, "memory", "HBM", "measured"),
        (Work(bytes=7e7, flops=1e7), {"slope": 0.05, "gain": 0.29}, "balanced", None, "measured"),
        (Work(bytes=4.9e7, flops=1e6), {"slope": 0.05, "gain": 0.29}, "balanced", None, "measured"),
        # a cache that is little faster than main memory
        (MEMORY, {"slope": 0.05, "gain": 0.29}, "memory", "HBM", "measured"),
        # no arithmetic at all
        (Work(bytes=7e7, flops=0), {"gain": 0.02}, "memory", "HBM", "measured"),
        # far from main memory's roof, and no faster without it: a transposition
        (Work(bytes=2.7e7, flops=0), {"gain": -0.03}, "memory", "addresses", "measured"),
        # slices for which a library has other programs
        (Work(bytes=1e7, flops=4e7), {"slope": 0.95, "gain": 0.7}, "compute", "fp32", "measured"),
        (Work(bytes=4e7, flops=4e7), {"slope": 0.95, "gain": 0.7}, "memory", "HBM", "measured"),
        # the cache is little faster than main memory, and no slope says so
        (Work(bytes=7.8e7, flops=2e7), {"gain": 0.02}, "memory", "HBM", "measured"),
        # far below the roof of arithmetic: the cache says nothing for it
        (Work(bytes=3e7, flops=1.3e7), {"gain": 0.02}, "balanced", None, "measured"),
        (Work(bytes=3e7, flops=6e7), {"gain": 0.02}, "compute", "fp32", "measured"),
        (COMPUTE, {"slope": 2 / 3, "gain": 0.15}, "compute", "fp32", "measured"),
        (COMPUTE, {"slope": 0.95, "gain": 0.01}, "compute", "fp32", "confirmed"),
        (COMPUTE, {"slope": 0.66, "gain": 0.01}, "compute", "fp32", "measured"),
        (Work(bytes=1e6, flops=7e7), {"slope": 0.66, "gain": 0.01}, "balanced", None, "measured"),
        # two clear experiments win
        (COMPUTE, {"slope": 0.2, "gain": 0.25}, "balanced", None, "measured"),
        (MEMORY, {"slope": 0.95, "gain": 0.01}, "compute", "fp32", "contradicted"),
        (COMPUTE, {"slope": 0.05, "gain": 0.6}, "memory", "HBM", "contradicted"),
        (MEMORY, {"slope": 0.05}, "memory", "HBM", "measured"),
        (MEMORY, {"gain": 0.6}, "memory", "HBM", "measured"),
        (COMPUTE, {"gain": 0.02}, "compute", "fp32", "measured"),
        # only its fixed part was measured, and the counts leave no doubt
        (MEMORY, {"fixed_us": 1.0}, "memory", "HBM", "measured"),
        (COMPUTE, {"fixed_us": 1.0}, "compute", "fp32", "measured"),
        (Work(bytes=7e7, flops=1e6), {"fixed_us": 1.0}, "memory", "HBM", "modelled"),
        # one experiment that does not decide: the roof does if it is reached
        (MEMORY, {"gain": 0.25}, "memory", "HBM", "measured"),
        (COMPUTE, {"gain": 0.25}, "compute", "fp32", "measured"),
        (Work(bytes=7e7, flops=1e6), {"gain": 0.25}, "memory", "HBM", "measured"),
        (Work(bytes=7e7, flops=1e7), {"gain": 0.25}, "balanced", None, "measured"),
        (MEMORY, {"fixed_us": 51.0, "slope": 0.05, "gain": 0.6}, "latency", None, "contradicted"),
        (MEMORY, {"fixed_us": 49.9, "slope": 0.05, "gain": 0.6}, "memory", "HBM", "measured"),
        (Work(bytes=1e6, flops=1e6), {"fixed_us": 99.0, "slope": 0.1, "gain": 0.02}, "latency", None, "confirmed"),
        (Work(bytes=1e6, flops=1e6), {"fixed_us": 99.0}, "latency", None, "measured"),
        (MEMORY, {"slope": 0.9, "gain": 0.6}, "balanced", None, "measured"),
        # arithmetic and traffic that do not overlap: both are seen, and traffic is most of the time
        (MEMORY, {"slope": 0.9, "gain": 0.7}, "memory", "HBM", "measured"),
        # arithmetic that is far below its roof, and takes as long as the traffic
        (MEMORY, {"slope": 0.95, "gain": 0.01, "cached_us": 99.0}, "compute", "fp32", "measured"),
    ],
)
def test_the_rules(its: Work, measured: dict[str, float], bound: str, unit: str | None, confidence: str) -> None:
    verdict = classify(operation(its, device="cuda"), GPU.roofs(), by_hand(**measured))
    assert (verdict.bound, verdict.unit, verdict.confidence) == (bound, unit, confidence)


def test_a_kernel_shorter_than_a_launch_waits_for_the_host() -> None:
    tiny = operation(Work(bytes=100, flops=100), device="cuda")
    measured = by_hand(time_us=3.0, spread_us=0.01, fixed_us=2.9, gain=0.0)
    assert classify(tiny, GPU.roofs(), measured).bound == "overhead"
    # launches that are queued ahead cost the device nothing
    assert classify(tiny, GPU.roofs(launch_us=0.0), measured).bound == "latency"


def test_units_that_neither_experiment_touches() -> None:
    exponentials = replace(operation(Work(bytes=1e6, flops=1e6), device="cuda"), special=9 * 10**7)
    roofs = replace(GPU.roofs(), special_per_s=1e12)
    verdict = classify(exponentials, roofs, by_hand(slope=0.02, gain=0.01))
    assert (verdict.bound, verdict.unit) == ("compute", "special")
    # 3.6e8 bytes in 100 us are 3.6 times what main memory allows, and 90 % of what the cache does
    reused = operation(Work(bytes=3.6e8, flops=1e6), device="cuda")
    verdict = classify(reused, roofs, by_hand(slope=0.02, gain=0.01))
    assert (verdict.bound, verdict.unit) == ("memory", "L2")
    assert classify(reused, roofs, by_hand(gain=0.01)).unit == "L2"
    nothing = operation(Work(bytes=1e6, flops=1e6), device="cuda")
    assert classify(nothing, roofs, by_hand(slope=0.02, gain=0.01)).bound == "balanced"


def test_without_an_experiment_the_model_says_why() -> None:
    verdict = classify(operation(MEMORY, device="cuda"), GPU.roofs(), by_hand(why_not={"cache": "it draws random numbers"}))
    assert (verdict.bound, verdict.unit, verdict.confidence) == ("memory", "HBM", "modelled")
    assert verdict.confirmed_by == "no experiment: cache: it draws random numbers"
    uncounted = replace(operation(MEMORY), flops=None, bytes=None)
    verdict = classify(uncounted, GPU.roofs())
    assert (verdict.bound, verdict.confidence) == (None, "modelled")
    assert "no rule counts it" in verdict.confirmed_by
    assert classify(uncounted, GPU.roofs(), by_hand(slope=0.0, gain=0.6)).bound == "memory"


def test_a_missing_experiment_has_its_reason_beside_the_numbers() -> None:
    measured = by_hand(gain=0.6, why_not={"intensity": "the budget ended before it"})
    verdict = classify(operation(MEMORY, device="cuda"), GPU.roofs(), measured)
    assert (verdict.bound, verdict.confidence) == ("memory", "measured")
    assert verdict.confirmed_by == "no slope (the budget ended before it), gain 0.60"


def test_a_time_far_from_both_roofs_is_not_explained_by_them() -> None:
    work = Work(bytes=1e6, flops=1e6)
    near_its_fixed_part, far = 0.9 * NEAR_FIXED * GPU.roofs().fixed_us, 100.0
    short = model(operation(work, device="cuda"), GPU.roofs(), near_its_fixed_part)
    assert (short.bound, short.roof_us) == ("latency", 1.0)
    assert short.roof_share == pytest.approx(1 / near_its_fixed_part)
    assert model(operation(work), GPU.roofs(), near_its_fixed_part).bound == "overhead"
    assert model(operation(work, device="cuda"), GPU.roofs(), far).bound is None
    slow = classify(operation(MEMORY, device="cuda"), GPU.roofs(), time_us=1e4)
    assert (slow.bound, slow.confidence) == (None, "modelled")
    assert "it takes 111 times as long as its roofs allow, which no count explains" in slow.confirmed_by


@pytest.mark.parametrize("op", ["c10d::allreduce_", "_c10d_functional::all_gather_into_tensor"])
def test_collectives_are_communication(op: str) -> None:
    verdict = classify(operation(MEMORY, device="cuda", op=op), GPU.roofs(), by_hand(slope=0.0, gain=0.6))
    assert (verdict.bound, verdict.unit) == ("communication", "link")


def test_item_is_the_host_on_a_gpu_only() -> None:
    assert classify(operation(MEMORY, device="cuda", op="aten::_local_scalar_dense"), GPU.roofs()).bound == "host"
    assert classify(operation(MEMORY, device="cpu", op="aten::_local_scalar_dense"), GPU.roofs()).bound != "host"


def test_settled_asks_for_more_runs_near_a_threshold() -> None:
    its = operation(MEMORY, device="cuda")
    assert settled(its, GPU.roofs(), by_hand(slope=0.05, gain=0.6))
    # the roof decides on both sides of 0.3 where it is reached
    assert settled(its, GPU.roofs(), by_hand(slope=0.05, gain=0.31))
    slower = operation(Work(bytes=7e7, flops=1e7), device="cuda")
    assert not settled(slower, GPU.roofs(), by_hand(slope=0.05, gain=0.31))
    assert not settled(its, GPU.roofs(), by_hand(slope=0.05, gain=0.6, spread_us=20.0))
    assert not settled(its, GPU.roofs(), by_hand(slope=0.05, gain=0.6, fixed_us=49.9))


def test_products_in_tf32_are_under_the_roof_of_the_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's convolutions take TF32 unless told otherwise, and its products do not."""
    measured = Ceilings(
        device="a machine", copy_gbs=4000.0, matmul_tflops={"fp32": 50.0, "bf16": 800.0}, cache_gbs=9000.0, fma_tflops=50.0,
        special_gops=1.0, launch_us=5.0, operator_us=5.0, node_us=1.0, date="",
    )  # fmt: skip
    device = torch.device("cuda")
    monkeypatch.setitem(devices._KNOWN, device, "sm90")

    def roof(op: str) -> tuple[str, float]:
        its = roofs_of(operation(Work(flops=1.0, bytes=1.0), device="cuda", op=op), device, measured)
        return its.arithmetic, its.flops_per_s

    conv, matmul = SimpleNamespace(fp32_precision="tf32"), SimpleNamespace(fp32_precision="ieee")
    monkeypatch.setattr(torch.backends.cudnn, "conv", conv)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    assert roof("aten::convolution") == ("tensor", 400e12)
    assert roof("aten::mm") == ("fp32", 50e12)
    conv.fp32_precision, matmul.fp32_precision = "ieee", "tf32"
    assert roof("aten::convolution") == ("fp32", 50e12)
    assert roof("aten::mm") == ("tensor", 400e12)
    monkeypatch.setitem(devices._KNOWN, device, "sm75")
    assert roof("aten::mm") == ("fp32", 50e12)
