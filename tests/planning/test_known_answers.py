"""Plans of models whose answers are computed by hand, on a made-up machine: 10 GB/s, 0.1 TFLOP/s, 5 µs for a launch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.hardware import ceilings
from rooftile.planning import Plan
from rooftile.planning.costs import DeviceCeilings, Pass, passes_of, share_of_waves, verdict_of
from rooftile.planning.formats import KEPT, weight_bytes
from rooftile.planning.timing import TimedCalls
from rooftile.qat import QuantisedLinear
from rooftile.weights import quantise_weight
from rooftile.weights.files.formats import SPARSE
from rooftile.weights.two_four import compress, two_four
from tests.planning.machine import CEILINGS, CPU, Pretended
from tests.planning.models import inputs, llama, mlp, tokens


def test_three_layers_by_hand() -> None:
    """8 rows.

    0: 524,288 FLOPs in 5.24 µs; 4 (256 128 + 8 128 + 8 256) = 143,360 bytes in 14.34 µs; with the launch 19.34 µs.
    2: the same FLOPs and bytes with N and K exchanged.
    4: 131,072 FLOPs in 1.31 µs; 4 (64 128 + 8 128 + 8 64) = 38,912 bytes in 3.89 µs, less than the launch: 8.89 µs.
    """
    plan = rt.plan(mlp(), inputs(), formats=["bf16"])
    assert [layer.name for layer in plan.layers] == ["0", "2", "4"]
    assert [layer.flops for layer in plan.layers] == [524_288, 524_288, 131_072]
    assert [layer.nbytes for layer in plan.layers] == [143_360, 143_360, 38_912]
    assert [layer.bounds for layer in plan.layers] == [("memory",), ("memory",), ("overhead",)]
    assert [layer.choice.predicted_us for layer in plan.layers] == pytest.approx([19.336, 19.336, 8.8912])
    assert [layer.choice.measured_us for layer in plan.layers] == pytest.approx([19.336, 19.336, 8.8912])
    # 0.1 TFLOP/s over 10 GB/s
    assert plan.layers[0].ridge == pytest.approx(10.0)
    assert plan.layers[0].intensity == pytest.approx(524_288 / 143_360)
    # twice the rows: 4 (256 128 + 16 384) bytes, and the launch
    assert plan.layers[0].doubled[0] == pytest.approx((15.5648 + 5) / 19.336, rel=1e-4)
    assert plan.total.kept_layers_us == pytest.approx(19.336 * 2 + 8.8912)
    assert plan.total.measured_us == pytest.approx(19.336 * 2 + 8.8912)
    assert {layer.chosen for layer in plan.layers} == {"fp32"}


def test_many_rows_are_bound_by_arithmetic() -> None:
    """4,096 rows of 0: 268 M FLOPs in 2,684 µs, 6.4 MB in 642 µs."""
    plan = rt.plan(mlp(), inputs(4096), formats=["bf16"])
    assert [layer.bounds for layer in plan.layers] == [("compute",)] * 3
    assert plan.layers[0].choice.predicted_us == pytest.approx(2684.35456 + 5)
    assert [verdict_of(layer.doubled[0] or 0) for layer in plan.layers] == ["compute"] * 3


def test_a_machine_that_is_slow_in_bf16_plans_codes_that_multiply_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 rows of 0, by hand: 67.1 M FLOPs at 1 GFLOP/s are 67,109 µs, and 671 µs in fp32.

    int8: reads x and writes codes, 393,216 bytes in 39.3 µs; writes the weight in fp32, 256 128 + 4 256 + 131,072 bytes in
    16.5 µs; multiplies in 671 µs; three launches.
    """
    slow = replace(CEILINGS, matmul_tflops=CEILINGS.matmul_tflops | {"bf16": 0.001})
    monkeypatch.setattr(ceilings, "measure", lambda device: slow)
    plan = rt.plan(mlp(torch.bfloat16), inputs(1024, torch.bfloat16), measure=False)
    first = {option.format: option for option in plan.layers[0].options}
    assert first["bf16"].predicted_us == pytest.approx(67_108.864 + 5)
    assert first["int8"].predicted_us == pytest.approx(39.3216 + 16.4864 + 671.08864 + 15)
    # int4 saves the pass over x: its weight is 256 64 + 2 256 + 131,072 bytes
    assert first["int4"].predicted_us == pytest.approx(14.7968 + 671.08864 + 10)
    assert {layer.chosen for layer in plan.layers} == {"int4"}
    assert plan.weights == {"0": "int4", "2": "int4", "4": "int4"}
    # the errors of INT8 are smaller, and FP8's lie between; a sum that INT4 exceeds leaves INT8
    allowed = 1.05 * sum(option.loss for layer in plan.layers for option in layer.options if option.format == "int8")
    careful = rt.plan(mlp(torch.bfloat16), inputs(1024, torch.bfloat16), measure=False, max_loss=allowed)
    assert {layer.chosen for layer in careful.layers} == {"int8"}
    assert careful.total.loss <= allowed


def test_losses_are_those_of_each_layer_alone() -> None:
    model, data = llama(), tokens()
    plan = rt.plan(model, data, data=data, formats=["bf16", "int4:32"], skip=["head"])

    def loss(changed: list[str]) -> float:
        other = copy.deepcopy(model)
        for name in changed:
            parent, layer = other.get_submodule(name.rpartition(".")[0]), other.get_submodule(name)
            rounded = QuantisedLinear(quantise_weight(layer.weight.detach(), "int4", group=32))
            setattr(parent, name.rpartition(".")[2], rounded)
        with torch.no_grad():
            return cross_entropy(other(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).item()

    base = loss([])
    assert plan.total.base_loss == pytest.approx(base, abs=1e-6)
    for layer in plan.layers[:-1]:
        due = loss([part.name for part in layer.parts]) - base
        assert layer.options[1].loss == pytest.approx(max(due, 0.0), abs=2e-6)
    everything = [part.name for layer in plan.layers if layer.chosen == "int4:32" for part in layer.parts]
    assert plan.total.measured_loss == pytest.approx(loss(everything) - base, abs=2e-6)
    assert plan.layers[-1].why_not == {"int4:32": "skip has 'head'"}


def test_without_data_a_loss_is_the_error_of_the_output() -> None:
    model, x = mlp(), inputs()
    plan = rt.plan(model, x, formats=["bf16", "int8"], max_loss=0)
    assert plan.total.base_loss is None
    assert "no data" in plan.total.loss_kind
    assert "no data" in str(plan)
    w = model[0].weight.detach()
    exact = x @ w.T + model[0].bias
    rounded = rt.linear(x, quantise_weight(w, "int8"), model[0].bias.detach())
    due = ((rounded - exact).norm() / exact.norm()).item()
    assert plan.layers[0].options[1].loss == pytest.approx(due, rel=1e-4)
    assert {layer.chosen for layer in plan.layers} == {"fp32"}, "0 allows no error"
    assert plan.weights == "auto"


class Fast(Pretended):
    """Products in formats take a tenth of their time, as on a machine with units for them."""

    def us(self, works: Sequence[TimedCalls]) -> list[float]:
        factors = [0.1 if any(one.flops == 0 for one in work.passes) else 1.0 for work in works]
        return [us * factor for us, factor in zip(super().us(works), factors, strict=True)]


def test_measured_times_win_over_predicted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftile.planning.make_plan.stopwatch_for", lambda device: Fast())
    assert set(rt.plan(mlp(), inputs(), formats=["bf16", "int8"]).weights.values()) == {"int8"}
    assert rt.plan(mlp(), inputs(), formats=["bf16", "int8"], measure=False).weights == "auto"


def test_a_whole_plan_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftile.planning.make_plan.stopwatch_for", lambda device: Fast())
    plan = rt.plan(mlp(), inputs(64), data=lambda model: model(inputs(64)).square().mean(), max_loss=1e-4)
    assert plan.total.loss == pytest.approx(sum(layer.choice.loss for layer in plan.layers))
    assert plan.total.loss <= 1e-4
    assert plan.total.layers_us == pytest.approx(sum(layer.choice.us for layer in plan.layers))
    assert plan.total.nbytes == sum(layer.choice.nbytes for layer in plan.layers)
    assert plan.total.layers_us <= min(plan.total.kept_layers_us, *[
        us for word, us in plan.total.single_us.items() if _loss_of(plan, word) <= 1e-4
    ])  # fmt: skip


def _loss_of(plan: Plan, word: str) -> float:
    return sum(option.loss for layer in plan.layers for option in layer.options if option.format == word)


FORMATS = ("fp8", "fp8_tile", "int8", "w8", "int4", "int4:32", "int4:row", "mxfp8", "mxfp4", "nvfp4")


@pytest.mark.parametrize("word", FORMATS)
@pytest.mark.parametrize("shape", [(37, 128), (300, 384)])
def test_bytes_of_weights_are_those_of_quantised_ones(word: str, shape: tuple[int, int]) -> None:
    format, _, group = word.partition(":")
    weight = quantise_weight(torch.randn(shape), format, group={"": None, "32": 32, "row": -1}[group])
    assert weight_bytes(*shape, word, 2) == weight.nbytes


def test_bytes_of_sparse_weights() -> None:
    """9/16 of 16 bits: half of the numbers, and two bits for each."""
    assert weight_bytes(64, 128, SPARSE, 2) == 64 * 128 * 2 * 9 // 16
    for shape, dtype in (((37, 20), torch.float32), ((8, 64), torch.bfloat16)):
        w = torch.randn(shape).to(dtype)
        assert weight_bytes(*shape, SPARSE, dtype.itemsize) == compress(w, two_four(w)).nbytes


def test_kernels_of_a_gpu_by_hand() -> None:
    """M = 2, N = 32, K = 64, bf16."""
    flops = 2 * 2 * 32 * 64
    arguments = (2, 32, 64)
    of = lambda word, **more: passes_of(*arguments, word, "bf16", 2, on_gpu=True, **more)  # noqa: E731
    y = 2 * 2 * 32
    assert of(KEPT) == [Pass(flops, 2 * (2 * 64 + 2 * 32 + 32 * 64), "bf16", (2, 32), y)]
    codes = Pass(flops, 2 * 64 + 2 * 2 * 32 + 32 * 64 + 4 * 32, "fp8", (2, 32), y)
    assert of("fp8") == [Pass(0, 3 * 2 * 64, "bf16"), codes]
    assert of("fp8", gets_codes=True) == [codes]
    assert of("int8")[1] == codes._replace(dtype="int8")
    assert of("int4:32") == [Pass(flops, 2 * (2 * 64 + 2 * 32) + 32 * 32 + 2 * 32 * 2, "bf16", (2, 32), y)]
    # 9/16 of the weight's bytes; with many rows 1.45 of the dense rate, too
    assert of(SPARSE, few=2) == [Pass(flops, 2 * (2 * 64 + 2 * 32) + 32 * 64 * 9 // 8, "bf16", (2, 32), y)]
    assert of(SPARSE, few=1)[0].flops == round(flops / 1.45)
    many = passes_of(512, 32, 64, SPARSE, "bf16", 2, on_gpu=True, few=128)
    assert many == [Pass(round(256 * flops / 1.45), 2 * 512 * (64 + 32) + 32 * 64 * 9 // 8, "bf16", (512, 32), 2 * 512 * 32)]
    # rows of 50,257, 30,522 and 768 numbers of 16 bits begin at multiples of 2, 4 and 16 bytes
    for columns, due in ((50257, 2), (30522, 4), (768, 16)):
        assert passes_of(64, columns, 64, KEPT, "bf16", 2, on_gpu=True)[0].aligned == due


def test_waves_of_tiles_by_hand() -> None:
    # two rows of three tiles on ten multiprocessors: six tiles, 12, 18 and 24 in 10, 20, 20 and 30 places
    assert share_of_waves(129, 513, 10) == 18 / 20
    assert share_of_waves(1, 1, 8) == 4 / 8
    assert share_of_waves(128 * 5, 256 * 2, 10) == 1


def test_a_product_on_a_gpu_by_hand() -> None:
    """Its waves, its fill and its result; CEILINGS are those of the simulated machine."""
    machine = DeviceCeilings(CPU, CEILINGS)
    one = Pass(10**8, 10**5, "fp32", (128, 256), 10**4)
    plain, fixed = machine.us([one]), machine.us([Pass(0, 0, "fp32")])
    assert plain == machine.us([one._replace(sizes=None)])
    machine._multiprocessors = 10
    written = 0.65 * (machine.us([Pass(0, 10**4, "fp32")]) - fixed)
    assert machine.us([one]) == pytest.approx((plain - fixed) / 0.4 + written + fixed + 4.0)
    assert machine.us([one._replace(aligned=4)]) == pytest.approx((plain - fixed) / 0.4 / 0.32 + written + fixed + 4.0)


def test_bounds_of_a_machine() -> None:
    machine = DeviceCeilings(CPU, CEILINGS)
    assert machine.bound([Pass(10**8, 10**6, "fp32")]) == "compute"
    assert machine.bound([Pass(10**7, 10**7, "fp32")]) == "memory"
    assert machine.bound([Pass(10**3, 10**3, "fp32")]) == "overhead"
    # the launches of several kernels add up, and the longest kernel says what bounds them
    assert machine.bound([Pass(0, 30_000, "fp32"), Pass(0, 30_000, "fp32"), Pass(8 * 10**5, 0, "fp32")]) == "overhead"
    assert machine.bound([Pass(0, 10**6, "fp32"), Pass(10**8, 10**6, "fp32")]) == "compute"
    assert machine.us([Pass(10**6, 0, "fp32"), Pass(0, 10**5, "fp32")]) == pytest.approx(10 + 10 + 2 * 5)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "memory"), (1.19, "memory"), (1.21, "both"), (1.61, "compute")])
def test_twice_the_rows(ratio: float, verdict: str) -> None:
    assert verdict_of(ratio) == verdict


def test_rows_and_calls_of_a_step_are_counted() -> None:
    """A layer that is called with 8 and with 3 rows, and twice with 8."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(128, 128)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))[:3].add(1).mul(self.layer(x[:3]))

    plan = rt.plan(Calls(), inputs(), formats=["bf16"])
    (layer,) = plan.layers
    assert {(load.rows, load.calls) for load in layer.loads} == {(8, 2.0), (3, 1.0)}
    assert layer.flops == 2 * 128 * 128 * (8 + 8 + 3)
    assert layer.choice.nbytes == 4 * 128 * 128, "its weight is there once"


def test_ceilings_that_a_layer_passes_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a process: they were measured while something else ran."""
    again = replace(CEILINGS, matmul_tflops=CEILINGS.matmul_tflops | {"fp32": 0.2})
    measured = []
    monkeypatch.setattr(ceilings, "measure_again", lambda device: measured.append(device) or again)
    monkeypatch.setattr("rooftile.planning.make_plan.stopwatch_for", lambda device: Pretended(0.5))
    monkeypatch.setattr("rooftile.planning.timing._measured_again", set())
    assert rt.plan(mlp(), inputs(), formats=["bf16"]).ceilings["matmul_tflops"]["fp32"] == 0.1, "short calls say little"
    plan = rt.plan(mlp(), inputs(8192), formats=["bf16"])
    assert plan.ceilings["matmul_tflops"]["fp32"] == 0.2
    assert plan.layers[0].choice.predicted_us == pytest.approx(2684.35456 + 5)
    rt.plan(mlp(), inputs(8192), formats=["bf16"])
    assert len(measured) == 1
