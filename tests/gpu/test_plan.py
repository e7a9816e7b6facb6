"""Plans on a GPU: its ceilings, its clock and its kernels."""

from __future__ import annotations

import copy

import pytest
import torch

import rooftile as rt
from rooftile.hardware import ceilings
from rooftile.models import TrainableDecoder
from rooftile_lab.bench.models import decoder_named

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]


def model() -> TrainableDecoder:
    torch.manual_seed(0)
    return TrainableDecoder(256, hidden=1024, heads=8, layers=2, ffn=4096, max_len=512).to("cuda", torch.bfloat16)


def test_ceilings_have_int8() -> None:
    found = ceilings.measure("cuda")
    assert found.matmul_tflops["int8"] > found.matmul_tflops["bf16"]


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_is_applied(backward: bool) -> None:
    ids = torch.randint(256, (4, 512), device="cuda")
    plan = rt.plan(model(), ids, data=ids, max_loss=0.05, skip=["head"], backward=backward)
    for layer in plan.layers[:-1]:
        assert [option.format for option in layer.options] == ["bf16", "fp8", "int8", "int4", *["2:4"] * (not backward)]
        assert all(option.measured_us and option.predicted_us > 0 for option in layer.options)
    assert plan.total.loss <= 0.05
    base = model()
    changed = plan.apply(copy.deepcopy(base))
    y, due = changed(ids).float(), base(ids).float()
    assert 0 < (y - due).norm() < 0.5 * due.norm() or plan.weights == "auto"


def test_a_decoder_at_batch_1_reads_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory bounds its layers, and INT4 has a quarter of the bytes."""
    # the fixture that fills fresh memory gives each product of ours a second kernel, which would be timed with it
    monkeypatch.undo()
    plan = rt.plan(decoder_named("0.6b", torch.device("cuda")), rows={"decode": 1}, context=640, formats=["bf16", "int4"])
    assert plan.total.predicted_us < plan.total.kept_us
    assert {layer.bounds for layer in plan.layers} <= {("memory",), ("overhead",)}
