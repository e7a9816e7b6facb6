"""Autocast followed through a step: the calls that become narrower and the casts, against a run under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.records import OperatorRow, Sample, StepCall
from rooftile.diagnosis.remedies import alone
from rooftile.diagnosis.remedies.bf16 import in_bf16
from rooftile.diagnosis.remedies.bf16.autocast import Narrowed, narrowed
from rooftile.diagnosis.remedies.bf16.in_bf16 import shares_in_bf16, with_backward
from rooftile.diagnosis.watching.dispatched import Dispatched
from rooftile.diagnosis.watching.watch import Record, Watch

BOTH = {torch.float32, torch.bfloat16}


class Casts(Dispatched):
    """Counts the copies between fp32 and bf16, their bytes, and the results in bf16 of one operator."""

    def __init__(self, op: str = "") -> None:
        super().__init__(self._look)
        self._op = op
        self.count = self.bytes = self.narrow = 0

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any) -> None:
        if func._schema.name == "aten::_to_copy" and {args[0].dtype, result.dtype} == BOTH:
            self.count += 1
            self.bytes += args[0].nbytes + result.nbytes
        self.narrow += func._schema.name == self._op and result.dtype == torch.bfloat16


def followed(step: Callable[[], Any], device: str = "cpu") -> tuple[Narrowed, list[OperatorRow]]:
    watch = Watch()
    with watch:
        step()
    return narrowed(watch.calls, watch.operations, watch.kept, device), watch.operations


def counted(step: Callable[[], Any], op: str = "") -> Casts:
    with torch.autocast("cpu", torch.bfloat16), Casts(op) as casts:
        step()
    return casts


def perceptron(*, backward: bool) -> Callable[[], Any]:
    model = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 32))
    x = torch.randn(64, 48)
    return lambda: model(x).square().mean().backward() if backward else model(x)


def residual() -> Callable[[], Any]:
    """The wide stream makes every sum wide."""
    layers, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), torch.randn(32, 64)

    def step() -> None:
        y = x + 0.0
        for layer in layers:
            y = y + F.relu(layer(y))
        y.square().mean().backward()

    return step


def convolutions() -> Callable[[], Any]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, bias=False), nn.BatchNorm2d(8)
    )
    x = torch.randn(4, 3, 16, 16)
    return lambda: model(x).square().mean().backward()


def one_weight_twice() -> Callable[[], Any]:
    layer, x = nn.Linear(64, 64, bias=False), torch.randn(16, 64)
    return lambda: layer(layer(x) + 1)


@pytest.mark.parametrize(
    "make",
    [lambda: perceptron(backward=False), lambda: perceptron(backward=True), residual, convolutions, one_weight_twice],
    ids=["inference", "training", "residual", "convolutions", "a weight twice"],
)
def test_the_casts_of_a_real_program(make: Callable[[], Callable[[], Any]]) -> None:
    step = make()
    found, _ = followed(step)
    true = counted(step)
    assert true.count > 1
    # a gradient that is cast for a narrow operand makes a few small ones narrow, which nobody follows
    assert sum(found.casts.values()) == pytest.approx(true.count, rel=0.16)
    assert sum(found.cast_bytes.values()) == pytest.approx(true.bytes, rel=0.05)


@pytest.mark.parametrize("op", ["aten::gelu", "aten::relu", "aten::add", "aten::mm", "aten::mean", "aten::addmm"])
def test_the_calls_that_become_narrower(op: str) -> None:
    for step in (perceptron(backward=True), residual()):
        found, operations = followed(step)
        narrow = sum(found.calls[row] for row, operation in enumerate(operations) if operation.op == op)
        assert narrow == counted(step, op).narrow, op


def test_a_gpus_list_has_norms_and_powers_in_fp32() -> None:
    """A GELU that is written out has a power, which is wide, and so is what follows."""
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)

    def step() -> Tensor:
        y = layer(x)
        return 0.5 * y * (1 + torch.tanh(0.8 * (y + 0.04 * torch.pow(y, 3.0))))

    on_gpu, operations = followed(step, "cuda")
    names = {operation.op: row for row, operation in enumerate(operations)}
    assert on_gpu.casts[names["aten::pow"]] == 1
    assert on_gpu.calls[names["aten::tanh"]] == 0
    on_cpu, _ = followed(step)
    assert on_cpu.calls[names["aten::tanh"]] == 1
    assert on_cpu.share(names["aten::tanh"], 1) == 1.0


def test_an_optimiser_and_numbers_of_other_dtypes_are_left_alone() -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    optimiser, ids = torch.optim.SGD([weight], lr=0.1), torch.arange(16)

    def step() -> None:
        (weight[ids] @ weight).sum().backward()
        optimiser.step()
        ids + 1

    found, operations = followed(step)
    assert any(operation.phase == "optimiser" for operation in operations)
    assert all(
        not found.calls[row] for row, operation in enumerate(operations)
        if operation.phase == "optimiser" or operation.dtype != "fp32"
    )  # fmt: skip


def test_an_attention_is_tried_forward_and_backward_in_both_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    step = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()  # noqa: E731
    watch = Watch()
    with watch:
        step()
    forward = next(op for op in watch.operations if op.phase == "forward" and "attention" in op.op)
    record = Record([forward], 1 << 20)
    with record:
        step()
    (sample,) = record.samples.values()
    dtypes = []
    whole = F.scaled_dot_product_attention
    monkeypatch.setattr(alone.F, "scaled_dot_product_attention", lambda q, *a, **k: dtypes.append(q.dtype) or whole(q, *a, **k))
    monkeypatch.setattr(alone, "times_us", lambda works, device: [work() for work in works] and [10.0, 50.0, 5.0, 15.0])
    cpu = torch.device("cpu")
    assert alone.chosen_shares(sample, torch.bfloat16, cpu, backward=True) == (0.5, 0.25)
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    monkeypatch.setattr(alone, "times_us", lambda works, device: [work() for work in works] and [10.0, 4.0])
    assert alone.chosen_shares(sample, torch.bfloat16, cpu, backward=False) == (0.4, 1.0)
    refused = Sample(forward, sample.function, (q[..., :5], k, v), {})
    assert alone.chosen_shares(refused, torch.bfloat16, cpu, backward=False) is None


@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_is_tried_by_the_call_that_chooses_its_kernel(monkeypatch: pytest.MonkeyPatch, affine: bool) -> None:
    model, x = nn.BatchNorm2d(8, affine=affine), torch.randn(4, 8, 6, 6)
    watch = Watch()
    with watch:
        model(x)
    record = Record([op for op in watch.operations if "batch_norm" in op.op], 1 << 20)
    with record:
        model(x)
    (sample,) = record.samples.values()
    before = sample.args[3].clone()
    dtypes = []
    whole = torch.batch_norm

    def seen(x: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
        dtypes.append((x.dtype, weight is None or weight.dtype))
        return whole(x, weight, *rest)

    monkeypatch.setattr(alone.torch, "batch_norm", seen)
    monkeypatch.setattr(alone, "times_us", lambda works, device: [work() for work in works] and [10.0, 50.0, 5.0, 15.0])
    assert alone.chosen_shares(sample, torch.bfloat16, torch.device("cpu"), backward=True) == (0.5, 0.25)
    assert dtypes[::2] == [(dtype, not affine or torch.float32) for dtype in (torch.float32, torch.bfloat16)]
    # the running statistics are as they were
    assert torch.equal(sample.args[3], before)


def test_a_backward_belongs_to_the_operator_that_chose_its_kernel() -> None:
    rows = [("a", "forward", "aten::cudnn_batch_norm"), ("b", "forward", "aten::_scaled_dot_product_efficient_attention")]
    rows += [("b", "backward", f"{rows[1][2]}_backward"), ("a", "backward", "aten::cudnn_batch_norm_backward")]
    rows += [("a", "backward", "aten::mm"), ("c", "backward", "aten::cudnn_batch_norm_backward")]
    operations = [
        OperatorRow(
            module=module, op=op, phase=phase, calls=1, flops=0, special=0, bytes=0, where="", dtype="fp32", device="cuda",
            key=(), indices=(),
        ) for module, phase, op in rows
    ]  # fmt: skip
    assert with_backward(operations) == [(0, [3]), (1, [2])]


def test_rows_are_tried_until_the_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [
        OperatorRow(
            module="", op="aten::mm", phase="forward", calls=1, flops=0, special=0, bytes=0, where="", dtype="fp32", device="cpu",
            key=("", "", n), indices=(),
        ) for n in range(3)
    ]  # fmt: skip
    kinds = {("a",): [0, 2], ("b",): [1]}
    monkeypatch.setattr(in_bf16, "narrower_share", lambda operation, *unused: 0.25 + operation.key[2])
    cpu = torch.device("cpu")
    assert shares_in_bf16(operations, kinds, {}, {}, cpu, Deadline(10)) == ({0: 0.25, 2: 0.25, 1: 1.25}, frozenset())
    assert shares_in_bf16(operations, kinds, {}, {}, cpu, Deadline(-1)) == ({}, {0, 1, 2})


def test_a_cast_takes_the_host_some_time() -> None:
    assert 0.1 < alone.cast_us(torch.device("cpu")) < 1000


def test_a_gradient_is_cast_back_once_for_each_cast() -> None:
    """A product whose operand was wide writes a narrow gradient, which becomes wide; that of a narrow operand stays."""
    size = 1000
    operations = [
        OperatorRow(
            module="m", op="aten::mm", phase=phase, calls=2, flops=0, special=0, bytes=0, where="", dtype="fp32", device="cuda",
            key=(), indices=(),
        ) for phase in ("forward", "backward")
    ]  # fmt: skip
    calls = [
        StepCall(row=0, reads={1: size, 2: 7 * size}, writes={3: size}, pointwise=False),
        StepCall(row=0, reads={3: size, 2: 7 * size}, writes={4: size}, pointwise=False),
        StepCall(row=1, reads={4: size, 2: 7 * size}, writes={5: size}, pointwise=False),
        StepCall(row=1, reads={5: size, 2: 7 * size}, writes={6: size}, pointwise=False),
    ]
    found = narrowed(calls, operations, frozenset({2}), "cuda")
    assert found.casts == {0: 2, 1: 1}
    assert found.cast_bytes[0] == 8 * size * 1.5
