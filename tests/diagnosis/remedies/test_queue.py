"""The queue between host and device: prices on a simulated machine whose host enqueues are exact."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftile.diagnosis.records import OperatorRow, StepCall
from rooftile.diagnosis.remedies import propose
from rooftile.diagnosis.remedies.bf16.narrower import narrower
from rooftile.diagnosis.remedies.queue import LaunchChange, Queue, joined
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.diagnosis.verdicts.findings import Finding
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.diagnosis.watching.timeline import Launch, _launched
from tests.diagnosis.machine import Asked, Machine, Work, enqueued, finding, steady_us

GPU = Machine(flops_per_us=5e7, bytes_per_us=4e6, cache_bytes_per_us=1.2e7, fixed_us=2.0, launch_us=5.0, device="cuda")
LAUNCH_US = 5.0
KEY = ("aten::x", ())

kernels = st.lists(
    st.builds(
        Asked, host_us=st.floats(1, 60), device_us=st.floats(1, 200), op=st.sampled_from(("aten::mm", "aten::add")),
        reads=st.booleans(),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


def profiled(asked: list[Asked], tail_us: float, slower: float = 1.0, depth: int = 1024) -> Queue:
    """The step as a profiler sees it, whose host is slower, at the pace that it has without one."""
    launches = tuple(Launch(one.host_us * slower, one.device_us, (one.op, ()), one.reads) for one in asked)
    return Queue(launches, tail_us * slower).paced(enqueued(asked, tail_us, depth=depth)[0])


@given(kernels, st.floats(0, 50), st.floats(1, 3), st.floats(0.05, 1.5))
def test_the_price_of_faster_kernels_is_exact(asked: list[Asked], tail_us: float, slower: float, left: float) -> None:
    """Host-bound or device-bound, or by turns, with waits between: the changed step takes what the machine needs."""
    before = steady_us(asked, tail_us)
    after = steady_us([replace(one, device_us=one.device_us * left) if one.op == "aten::mm" else one for one in asked], tail_us)
    changes = {("aten::mm", ()): LaunchChange(device=left)}
    found = profiled(asked, tail_us, slower).saved_us(changes, before)
    assert found == pytest.approx(before - after, rel=1e-3, abs=1e-3 * before)


@given(kernels, st.floats(0, 50), st.floats(0, 20), st.floats(0, 20))
def test_the_price_of_more_kernels_is_exact(asked: list[Asked], tail_us: float, host_us: float, device_us: float) -> None:
    its = sum(one.op == "aten::mm" for one in asked)
    more = [
        replace(one, host_us=one.host_us + host_us, device_us=one.device_us + device_us) if one.op == "aten::mm" else one
        for one in asked
    ]
    before, after = steady_us(asked, tail_us), steady_us(more, tail_us)
    changes = {("aten::mm", ()): LaunchChange(device_us=device_us * its, host_us=host_us * its)}
    found = profiled(asked, tail_us).saved_us(changes, before)
    assert found == pytest.approx(before - after, rel=1e-3, abs=1e-3 * before)


def test_a_full_queue_holds_the_host_up() -> None:
    """The host asks for 3,000 kernels of 20 us in 5 us each: it may be 1,024 ahead, and its own pace is found all the same."""
    asked = [Asked(host_us=5.0, device_us=20.0, op="aten::mm")] * 3000
    returned_us, step_us = enqueued(asked)[0], steady_us(asked)
    assert returned_us > 2.5 * 5.0 * 3000
    queue = profiled(asked, 0.0, slower=1.7)
    assert queue.host_us == pytest.approx(5.0 * 3000, rel=1e-2)
    after = steady_us([replace(one, device_us=1.0) for one in asked])
    saved = queue.saved_us({("aten::mm", ()): LaunchChange(device=1 / 20)}, step_us)
    assert saved == pytest.approx(step_us - after, rel=1e-2)


def test_a_step_is_never_shorter_than_its_host() -> None:
    queue = Queue((Launch(30.0, 40.0, KEY), Launch(30.0, 40.0, KEY)), tail_us=5.0)
    assert queue.run() == (65.0, 110.0)
    # the device is busy with one step after the other
    assert queue.step_us == 80.0
    assert queue.saved_us({KEY: LaunchChange(device=0.0)}, 80.0) == pytest.approx(80.0 - 65.0)
    # a wait of the program's own stays when launches become cheaper
    slow = Queue((Launch(5000.0, 1.0, KEY),))
    assert slow.changed({KEY: LaunchChange(host=3.0)}).launches[0].host_us == 4003.0
    assert Queue(()).saved_us({}, 10.0) == 0.0


def test_rows_with_one_key_share_its_launches() -> None:
    rows = [operation("aten::mm", calls=calls) for calls in (1, 3)]
    found = joined({0: LaunchChange(device=0.0, host=8.0)}, rows)
    # three of four launches are as before
    assert found == {("aten::mm", ()): LaunchChange(device=0.75, host=8.0, kept=0.75)}
    queue = Queue(tuple(Launch(20.0, 4.0, ("aten::mm", ())) for _ in range(4))).changed(found)
    assert [launch[:2] for launch in queue.launches] == [(8.0 / 4 + 15.0, 3.0)] * 4
    found = joined(
        {0: LaunchChange(device=0.0, host=8.0, device_us=1.0), 1: LaunchChange(device=0.5, host=1.0, host_us=2.0)}, rows
    )
    assert found == {("aten::mm", ()): LaunchChange(device=0.375, device_us=1.0, host=9.0, host_us=2.0)}


def test_the_hosts_time_leaves_out_its_waits() -> None:
    """Asked at 10, 20 and 90 us; between the second and the third the host waits for 60 us; 5 us after the last it is done."""
    work = [(20_000, 2.0, KEY), (10_000, 1.0, None), (90_000, 3.0, KEY)]
    launched, tail_us = _launched(work, [(25_000, 85_000), (96_000, 200_000)], (0, 95_000))
    assert launched == [Launch(10.0, 1.0), Launch(10.0, 2.0, KEY, True), Launch(10.0, 3.0, KEY)]
    assert tail_us == 5.0


def operation(op: str, calls: int = 1, phase: str = "forward", module: str = "m") -> OperatorRow:
    return OperatorRow(
        module=module, op=op, phase=phase, calls=calls, flops=0, special=0, bytes=0, where="", dtype="fp32", device="cuda",
        key=(), indices=(),
    )  # fmt: skip


def seen(
    findings: list[Finding], calls: list[StepCall], asked: list[Asked], tail_us: float, **known: Any
) -> propose.ObservedStep:
    ceilings = SimpleNamespace(
        matmul_tflops={"fp32": 50.0, "bf16": 800.0}, launch_us=LAUNCH_US, copy_gbs=GPU.bytes_per_us / 1e3, node_us=0.0
    )
    return propose.ObservedStep(
        device=torch.device("cuda"), ceilings=ceilings,  # type: ignore[arg-type]
        step=StepEvidence(time_us=steady_us(asked, tail_us)), findings=findings, calls=calls, kept=frozenset(), busy_us=0.0,
        launches=len(asked), queue=profiled(asked, tail_us), **known,
    )  # fmt: skip


def row(op: str, work: Work, calls: int, phase: str = "forward", module: str = "m") -> Finding:
    found = finding(GPU, work, calls=calls, op=op)
    return replace(found, operation=replace(found.operation, phase=phase, module=module, key=(module, phase, op, "")))


def test_bf16_of_a_step_that_the_host_nearly_holds_up() -> None:
    """Products take 20 of 32 ms on the device, the host takes 30 ms: a product ten times as fast saves far less than it gains."""
    size, count = 4 << 20, 100
    product = row("aten::mm", Work(flops=198e3 * GPU.flops_per_us / 1e3, bytes=4.0), count)
    other = row("aten::gelu", Work(flops=0, bytes=118.0 * GPU.bytes_per_us), count)
    assert product.call_us + other.call_us == pytest.approx(320.0)
    asked = [Asked(host_us=150.0, device_us=f.call_us, op=f.operation.op) for f in (product, other)] * count
    calls = [
        one for n in range(count)
        for one in (
            StepCall(row=0, reads={3 * n: size, 9000 + n: size}, writes={3 * n + 1: size}, pointwise=False),
            # a wide tensor beside makes the result wide, so the next product's operand is cast again
            StepCall(row=1, reads={3 * n + 1: size, 5000: size}, writes={3 * n + 3: size}, pointwise=True),
        )
    ]  # fmt: skip
    its = seen([product, other], calls, asked, 0.0, narrower={0: 0.1}, cast_us=6.0)
    remedy = narrower(its)
    cast_device_us = 1.5 * size / GPU.bytes_per_us
    changed = [
        replace(one, host_us=one.host_us + 2 * 6.0, device_us=0.1 * one.device_us + 2 * cast_device_us)
        if one.op == "aten::mm" else one for one in asked
    ]  # fmt: skip
    saved = its.step.time_us - steady_us(changed)
    assert remedy is not None
    assert remedy.predicted_us == pytest.approx(saved, rel=1e-3)
    # the kernels alone would say 18 ms
    assert remedy.predicted_us < 0.1 * 0.9 * product.time_us
    assert "its 200 casts move 1,258.3 MB; then the host holds the step up, with 31.2 ms" in remedy.how


def priced(findings: list[Finding], calls: list[StepCall], asked: list[Asked]) -> Remedy:
    its = seen(findings, calls, asked, 0.0)
    return next(r for r in propose._fused(its) if r is not None and r.name == "compile")


@given(st.floats(6, 100), st.floats(1, 40))
def test_compiling_saves_the_bytes_of_chains_and_the_hosts_launches(host_us: float, megabytes: float) -> None:
    """Ten layers of a product and four elementwise calls: max(the host's launches, the kernels') is what is left."""
    work = Work(flops=0, bytes=2e6 * megabytes)
    size = round(1e6 * megabytes)
    product = row("aten::mm", Work(flops=100 * GPU.flops_per_us, bytes=4.0), 10)
    chain = [row(f"aten::op{i}", work, 10) for i in range(4)]
    calls, asked = [], []
    for layer in range(10):
        first = 100 * layer
        calls.append(StepCall(row=0, reads={first - 1: size}, writes={first: size}, pointwise=False))
        asked.append(Asked(host_us=host_us, device_us=product.call_us, op="aten::mm"))
        for i in range(4):
            write = first + 99 if i == 3 else first + i + 1
            calls.append(StepCall(row=i + 1, reads={first + i: size}, writes={write: size}, pointwise=True))
            asked.append(Asked(host_us=host_us, device_us=chain[i].call_us, op=f"aten::op{i}"))
    fused_us = GPU.exact(work)
    pace = propose.PACE * LAUNCH_US
    after = [Asked(host_us=pace, device_us=product.call_us, op=""), Asked(host_us=pace, device_us=fused_us, op="")] * 10
    # the code is given one tensor: the first layer's input
    after[0] = replace(after[0], host_us=pace + propose.GUARD * LAUNCH_US)
    before_us, after_us = steady_us(asked), steady_us(after)
    remedy = priced([product, *chain], calls, asked)
    # the fused kernel is spread over the launches of its parts, so its first part may start a little earlier
    assert remedy.predicted_us == pytest.approx(before_us - after_us, abs=fused_us + 5 * pace)


def test_compiling_leaves_what_lies_outside_of_modules() -> None:
    """An engine whose host works beside its model: only the model's launches become cheaper."""
    inside, outside = (row(f"aten::{name}", Work(flops=0, bytes=4e4), 100, module=name[:1]) for name in ("model", "x"))
    outside = replace(outside, operation=replace(outside.operation, module=""))
    calls = [StepCall(row=n % 2, reads={n: 1 << 14}, writes={n + 9000: 1 << 14}, pointwise=False) for n in range(200)]
    asked = [Asked(host_us=40.0, device_us=f.call_us, op=f.operation.op) for f in (inside, outside)] * 100
    after = [replace(one, host_us=propose.PACE * LAUNCH_US) if one.op == "aten::model" else one for one in asked]
    # each call of the model reads a tensor that no other has made
    after[0] = replace(after[0], host_us=after[0].host_us + 100 * propose.GUARD * LAUNCH_US)
    assert priced([inside, outside], calls, asked).predicted_us == pytest.approx(steady_us(asked) - steady_us(after))


def test_compiling_an_optimiser_that_the_host_holds_up_leaves_a_launch_for_each_tensor() -> None:
    """AdamW, a loop: 200 tensors with 11 small kernels each, 8 us of the host for each."""
    names = [f"aten::op{i}_" for i in range(11)]
    findings = [row(name, Work(flops=0, bytes=48e3), 200, "optimiser", "") for name in names]
    calls = [
        StepCall(row=i, reads={n: 16384, 1000 + n: 16384}, writes={n: 16384}, pointwise=True)
        for n in range(200)
        for i in range(11)
    ]
    asked = [Asked(host_us=8.0, device_us=findings[0].call_us, op=name) for name in names] * 200
    remedy = priced(findings, calls, asked)
    before = steady_us(asked)
    left_us = 200 * propose.PACE * LAUNCH_US + 400 * propose.GUARD * LAUNCH_US
    assert remedy.predicted_us == pytest.approx(before - left_us, rel=0.05)


def test_compiling_has_no_price_where_many_calls_are_custom_operators() -> None:
    """An engine's step: a product, and operators of its own."""
    work = Work(flops=0, bytes=4e4)
    for custom, is_priced in ((1, True), (40, False)):
        findings = [row("aten::mm", work, 60), row("rooftile::gated", work, custom)]
        calls = [
            StepCall(row=int(n >= 60), reads={n: 1 << 14}, writes={n + 9000: 1 << 14}, pointwise=False)
            for n in range(60 + custom)
        ]
        asked = [Asked(host_us=40.0, device_us=findings[call.row].call_us, op=findings[call.row].operation.op) for call in calls]
        its = seen(findings, calls, asked, 0.0)
        assert any(r is not None and r.name == "compile" for r in propose._fused(its)) == is_priced
        assert any("custom operators" in note for note in propose.why_not_compiled(its)) == (not is_priced)


@pytest.mark.parametrize("work_us", [400.0, 5_000.0])
def test_compile_saves_nothing_of_the_hosts_other_work(work_us: float) -> None:
    """Before each small kernel the host resizes an image, which compiled code waits for as well."""
    small = row("aten::add", Work(flops=0, bytes=4.0), 50)
    calls = [StepCall(row=0, reads={n: 4}, writes={n + 1: 4}, pointwise=False) for n in range(50)]
    plain = [Asked(host_us=60.0, device_us=2.0, op="aten::add")] * 50
    worked = [replace(one, host_us=one.host_us + work_us) for one in plain]
    lone = seen([small], calls, plain, 0.0)
    beside = seen([small], calls, worked, 0.0)
    beside = replace(beside, step=replace(beside.step, waiting_us=50 * work_us, idle_us={"host": 50 * (60.0 + work_us)}))
    found = [propose._compiled(its) for its in (lone, beside)]
    assert None not in found
    assert found[1].predicted_us == pytest.approx(found[0].predicted_us, rel=0.05)
