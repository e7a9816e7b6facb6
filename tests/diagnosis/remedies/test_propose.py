"""Remedies of real programs: which operators they name, and how many bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rooftile as rt
from rooftile.diagnosis.records import OperatorRow, Sample, StepCall
from rooftile.diagnosis.remedies import alone
from rooftile.diagnosis.remedies.attentions import find_attentions
from rooftile.diagnosis.remedies.bf16.narrower import narrower, why_no_price
from rooftile.diagnosis.remedies.fusion.chains import find_chains
from rooftile.diagnosis.watching.watch import Watch
from tests.diagnosis.machine import Machine, Work, finding

GPU = Machine(flops_per_us=1e6, bytes_per_us=1e6, cache_bytes_per_us=4e6, fixed_us=2.0, launch_us=5.0, device="cuda")
SIZE = 1000
BYTES = 4 * SIZE


def watched(step: Callable[[], Any]) -> Watch:
    watch = Watch()
    with watch:
        step()
    return watch


def names(watch: Watch, calls: tuple[StepCall, ...]) -> list[str]:
    return [watch.operations[call.row].op.removeprefix("aten::") for call in calls]


def test_a_chain_of_a_real_program() -> None:
    x, weight = torch.randn(SIZE), torch.randn(10, 10)

    def step() -> Tensor:
        weight @ weight
        return ((x * 2 + 1).cos() + x).tanh()

    watch = watched(step)
    (chain,) = find_chains(watch.calls, watch.kept)
    assert names(watch, chain.calls) == ["mul", "add", "cos", "add", "tanh"]
    assert (chain.bytes_now, chain.bytes_fused) == (11 * BYTES, 2 * BYTES)


def test_a_tensor_that_outlives_the_step_is_written() -> None:
    x, results = torch.randn(SIZE), []

    def step() -> None:
        y = x * 2
        results.append(y)
        (y + 1).cos()

    watch = watched(step)
    (chain,) = find_chains(watch.calls, watch.kept)
    assert chain.bytes_fused == 3 * BYTES


def test_memory_that_is_used_again_is_another_tensor() -> None:
    """Each result lies where the one before the last lay, and still there are 40 tensors."""
    x = torch.randn(SIZE)

    def step() -> None:
        y = x
        for _ in range(40):
            y = y * 1.5

    watch = watched(step)
    written = {tensor for call in watch.calls for tensor in call.writes}
    assert len(written) == 40
    assert len(watch.kept & written) == 0


def test_reductions_of_rows_belong_to_a_chain_and_others_do_not() -> None:
    x = torch.randn(10, 100)
    norm = watched(lambda: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt())
    (chain,) = find_chains(norm.calls, norm.kept)
    assert names(norm, chain.calls) == ["pow", "mean", "add", "rsqrt", "mul"]
    assert chain.bytes_fused == 2 * BYTES
    columns = watched(lambda: (x * 2).mean(0) + 1)
    assert find_chains(columns.calls, columns.kept) == []


def test_what_reads_one_tensor_is_fused_whatever_lies_between() -> None:
    """A backward's two products with one gradient, with the sum of a bias between them."""
    grad, a, b = (torch.randn(50, 100) for _ in range(3))

    def step() -> Tensor:
        left = grad * a
        grad.sum(0)
        return left + grad * b

    watch = watched(step)
    (chain,) = find_chains(watch.calls, watch.kept)
    assert names(watch, chain.calls) == ["mul", "mul", "add"]
    assert (chain.bytes_now, chain.bytes_fused) == (9 * 5 * BYTES, 4 * 5 * BYTES)


def test_a_chain_waits_for_nothing_that_is_made_of_its_own_result() -> None:
    x, weight = torch.randn(100, 100), torch.randn(100, 100)
    through = watched(lambda: x * 2 + (x * 2) @ weight)
    assert [names(through, chain.calls) for chain in find_chains(through.calls, through.kept)] == [["mul", "mul"]]

    def written() -> Tensor:
        y = x * 2
        torch.mm(x, weight, out=y)
        return y + 1

    replaced = watched(written)
    assert find_chains(replaced.calls, replaced.kept) == []
    # two that read the same small tensor have nothing to gain
    scale = torch.randn(100)
    apart = watched(lambda: (torch.mul(x, scale), torch.mul(weight, scale)))
    assert find_chains(apart.calls, apart.kept) == []


class Attention(nn.Module):
    """Written out, called by keyword, as in Transformers."""

    def __init__(self, dropout: float = 0.0, *, fused: bool = False) -> None:
        super().__init__()
        self.qkv, self.dropout, self.fused = nn.Linear(32, 96), nn.Dropout(dropout), fused

    def forward(self, *, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 2, 16).transpose(1, 2) for y in self.qkv(x).split(32, -1))
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, 32)
        scores = q @ k.transpose(2, 3) / math.sqrt(16)
        hidden = torch.ones(t, t, dtype=torch.bool).tril().logical_not()
        weights = self.dropout(scores.masked_fill(hidden, -math.inf).softmax(-1))
        return (weights @ v).transpose(1, 2).reshape(b, t, 32)


class Layers(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x=x)
        return self.head(x)


def rows(watch: Watch, picked: frozenset[int]) -> list[tuple[str, str]]:
    return sorted((watch.operations[row].phase, watch.operations[row].op.removeprefix("aten::")) for row in picked)


def test_an_attention_written_by_hand_is_found_with_its_backward() -> None:
    model, x = Layers(Attention), torch.randn(2, 24, 32)
    watch = watched(lambda: model(x).sum().backward())
    (one,) = find_attentions(watch.operations, watch.calls)
    assert (one.q, one.k, one.v) == ((4, 24, 1, 16), (4, 24, 1, 16), (4, 24, 1, 16))
    assert (one.calls, one.backward, one.dropout, one.fused) == (3, True, False, False)
    found = rows(watch, one.rows)
    assert {("forward", "bmm"), ("forward", "_softmax"), ("forward", "div"), ("forward", "masked_fill")} <= set(found)
    assert [op for phase, op in found if phase == "backward"].count("bmm") >= 2
    assert ("backward", "_softmax_backward_data") in found
    assert not any(op in ("addmm", "mm", "add") for _, op in found)


def test_dropout_of_an_attention_and_a_fused_one_are_seen() -> None:
    x = torch.randn(2, 24, 32)
    model = Layers(lambda: Attention(0.5))
    (one,) = find_attentions(*_seen(watched(lambda: model(x))))
    assert (one.dropout, one.backward) == (True, False)
    fused = Layers(lambda: Attention(fused=True))
    (one,) = find_attentions(*_seen(watched(lambda: fused(x).sum().backward())))
    assert (one.fused, one.backward, one.calls) == (True, True, 3)
    assert one.q == (2, 24, 2, 16)
    plain = nn.Linear(32, 32)
    assert find_attentions(*_seen(watched(lambda: plain(x).softmax(-1) @ x.mT))) == []


def _seen(watch: Watch) -> tuple[list[OperatorRow], list[StepCall]]:
    return watch.operations, watch.calls


def test_the_backward_belongs_to_the_module_of_its_forward() -> None:
    """Also where modules are called by keyword, and the same in all layers."""
    model, x = Layers(Attention), torch.randn(2, 24, 32)
    operations = watched(lambda: model(x).sum().backward()).operations
    for op in operations:
        if op.op in ("aten::bmm", "aten::_softmax_backward_data", "aten::masked_fill"):
            assert op.module == "Layers.layers.*", op
        if op.op == "aten::mm":
            assert op.module in ("Layers.layers.*.qkv", "Layers.head"), op
    assert {op.calls for op in operations if op.op == "aten::_softmax_backward_data"} == {3}
    mixed = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    modules = {op.module for op in watched(lambda: mixed(x)).operations}
    assert modules == {"Sequential.0", "Sequential.1", "Sequential.2"}


def test_a_checkpoint_has_the_price_of_its_second_forward() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), torch.randn(512, 256)
    found = rt.diagnose(lambda: checkpoint(model, x, use_reentrant=False).sum().backward(), budget=1)
    remedy = next(r for r in found.remedies if r.name == "store instead of recompute")
    again = [found.ops[row] for row in remedy.ops]
    assert {op.op for op in again} >= {"aten::addmm", "aten::gelu"}
    assert {op.phase for op in again} == {"backward"}
    assert "Sequential" in remedy.how
    plain = rt.diagnose(lambda: model(x).sum().backward(), budget=1)
    assert all(r.name != "store instead of recompute" for r in plain.remedies)


def test_an_optimisers_many_calls_can_be_one() -> None:
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(20)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    loop, fused = (torch.optim.AdamW(weights, foreach=False, fused=fused) for fused in (False, True))
    remedy = next(r for r in rt.diagnose(loop.step, budget=1).remedies if r.name == "fused optimiser")
    assert "calls become one" in remedy.how
    assert all(r.name != "fused optimiser" for r in rt.diagnose(fused.step, budget=1).remedies)


def test_a_step_without_a_module_is_compiled_with_its_optimiser() -> None:
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(20)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    found = rt.diagnose(torch.optim.AdamW(weights, foreach=False).step, budget=1)
    remedy = next(r for r in found.remedies if r.name == "compile")
    fused = {found.ops[row].op for row in remedy.ops}
    assert {"aten::mul_", "aten::lerp_", "aten::addcdiv_"} <= fused
    assert remedy.predicted_us > 0
    assert "160 launches fewer" in remedy.how


def test_a_number_that_is_read_ends_a_compiled_piece() -> None:
    x = torch.randn(256, 256)

    def step() -> None:
        for _ in range(100):
            (x[0] + 1).sum().item()

    found = rt.diagnose(step, budget=1)
    predicted = sum(r.predicted_us for r in found.remedies if r.name == "compile")
    assert predicted < 0.3 * found.step.time_us


def test_a_product_is_tried_in_the_narrower_dtype_with_its_own_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(16, 8), torch.randn(4, 16)
    operations = {op.op: op for op in watched(lambda: (x.T @ weight.T).sum()).operations}
    seen = []
    monkeypatch.setattr(alone, "times_us", lambda works, device, runs=1: [seen.append(works) or 100.0] * len(works))
    assert alone.narrower_share(operations["aten::sum"], None, torch.bfloat16, torch.device("cpu")) is None
    assert alone.narrower_share(operations["aten::mm"], None, torch.bfloat16, torch.device("cpu")) == 1.0
    (narrow,) = seen[1]
    product = narrow()
    assert (product.dtype, product.shape) == (torch.bfloat16, (8, 4))
    # a first run that is far slower needs no other
    times = iter([[1.0], [500.0]])
    monkeypatch.setattr(alone, "times_us", lambda works, device, runs=1: next(times))
    assert alone.narrower_share(operations["aten::mm"], None, torch.bfloat16, torch.device("cpu")) == 500.0


def test_a_gpu_is_timed_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is kept busy for as long as the host needed to ask the last time."""
    device, busy, clock = torch.device("cuda"), [], iter(range(1000))

    class Event:
        def __init__(self, **unused: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) / 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "_sleep", busy.append)
    (us,) = alone.times_us([lambda: time.sleep(0.01)], device, runs=3)
    assert us == 1.0
    assert len(busy) == 4
    # 2000 cycles for each of 10,000 us, and some room
    assert busy[0] < 2000 * 100 < 2000 * 10_000 < busy[1] < 2000 * 20_000


def test_the_lse_of_attention_stays_in_fp32_when_the_rest_is_tried_in_bf16() -> None:
    seen = set()

    def backward(grad: torch.Tensor, lse: torch.Tensor, dropout: float) -> torch.Tensor:
        seen.add((grad.dtype, lse.dtype))
        return grad

    grad, lse = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8)
    operation = OperatorRow(
        module="", op="aten::_scaled_dot_product_efficient_attention_backward", phase="backward", calls=1, flops=1, special=0,
        bytes=1, where="", dtype="fp32", device="cpu", key=("", "", "", "", ()), indices=(0,),
    )  # fmt: skip
    sample = Sample(operation, backward, (grad, lse, 0.1), {})
    assert alone.narrower_share(operation, sample, torch.bfloat16, torch.device("cpu")) is not None
    assert seen == {(torch.float32, torch.float32), (torch.bfloat16, torch.float32)}


def test_random_numbers_of_compiled_code_are_no_saving_on_a_cpu() -> None:
    x = torch.randn(500, 500)
    plain = rt.diagnose(lambda: (x * 2 + 1).relu(), budget=0.5)
    drawn = rt.diagnose(lambda: nn.functional.dropout((x * 2 + 1).relu(), 0.3) + 1, budget=0.5)
    assert any(remedy.name == "compile" for remedy in plain.remedies)
    assert not any(remedy.name == "compile" for remedy in drawn.remedies)
    assert any(remedy.name == "fuse" for remedy in drawn.remedies)


def test_a_program_in_bf16_is_not_told_to_run_what_it_keeps_in_fp32_in_bf16() -> None:
    mm = finding(GPU, Work(bytes=1e6, flops=1e9), op="aten::mm", calls=1)
    norm = finding(GPU, Work(bytes=1e8, flops=1e6), op="aten::mul", calls=1)

    calls = [
        StepCall(row=0, reads={1: 16, 2: 16}, writes={3: 16}, pointwise=False),
        StepCall(row=1, reads={3: 16}, writes={4: 16}, pointwise=True),
    ]

    def given(dtype: str, shares: dict[int, float], too_late: frozenset[int] = frozenset()) -> Any:
        products = replace(mm, operation=replace(mm.operation, dtype=dtype))
        ceilings = SimpleNamespace(matmul_tflops={"fp32": 50.0, "bf16": 800.0}, copy_gbs=1000.0, node_us=1.0)
        return SimpleNamespace(
            ceilings=ceilings, findings=[products, norm], narrower=shares, device=torch.device("cuda"), calls=calls,
            kept=frozenset(), queue=None, cast_us=1.0, step=SimpleNamespace(time_us=2000.0), too_late=too_late,
        )  # fmt: skip

    assert narrower(given("bf16", {0: 0.1})) is None
    assert why_no_price(given("bf16", {})) == []
    whole = narrower(given("fp32", {0: 0.1}))
    assert whole is not None
    # the product's time, half of the traffic after it, and two casts
    assert whole.predicted_us == pytest.approx(0.9 * mm.time_us + 0.5 * norm.traffic_us - 2 * (1.0 + 1.0), rel=1e-3)
    assert "in this price" not in whole.how
    assert why_no_price(given("fp32", {0: 0.1})) == []
    # a price counts only operators that were run, and the words or a note say which were not, and why
    untried = narrower(given("fp32", {}))
    assert untried is not None
    assert untried.predicted_us == pytest.approx(0.5 * norm.traffic_us - 2 * (1.0 + 1.0), rel=1e-3)
    assert "operators of 1 ms could not be run alone in it, and are not in this price" in untried.how
    late = given("fp32", {}, frozenset({0}))
    assert "were not tried in it, as a quarter of the budget had passed: a larger --budget tries them, and" in narrower(late).how
    (note,) = why_no_price(late)
    assert note.startswith("bf16 has no price: operators of 1 ms were not tried in it")
    slow = given("fp32", {})
    slow.ceilings.matmul_tflops["bf16"] = 0.5
    assert narrower(slow) is None
    assert why_no_price(slow) == ["bf16 has no price: products are 100 times as slow in it on this machine"]
