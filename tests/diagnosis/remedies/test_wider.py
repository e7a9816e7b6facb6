"""A program in a dtype that is slower here than fp32 is told so first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.records import OperatorRow, Sample
from rooftile.diagnosis.remedies.observed_step import ObservedStep
from rooftile.diagnosis.remedies.propose import propose
from rooftile.diagnosis.remedies.wider import shares_in_fp32, slow_dtypes
from rooftile.diagnosis.verdicts.findings import find
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.hardware.ceilings import Ceilings
from tests.diagnosis.machine import Machine

CPU = torch.device("cpu")
MACHINE = Machine(flops_per_us=1e6, bytes_per_us=1e5, cache_bytes_per_us=2e5, fixed_us=1.0)
MEASURED = Ceilings(
    device="a machine", copy_gbs=100.0, matmul_tflops={"fp32": 1.0, "bf16": 0.1, "fp16": 0.9}, cache_gbs=200.0, fma_tflops=1.0,
    special_gops=1.0, launch_us=1.0, operator_us=1.0, node_us=None, date="",
)  # fmt: skip


def product(dtype: str, kind: str = "a") -> OperatorRow:
    return OperatorRow(
        module="m", op="aten::mm", phase="forward", calls=2, flops=10**6, special=0, bytes=10**4, where="", dtype=dtype,
        device="cpu", key=("m", "forward", kind), indices=(0,),
    )  # fmt: skip


def test_a_dtype_is_slow_if_its_products_are() -> None:
    assert slow_dtypes(MEASURED) == ["bf16"]
    assert slow_dtypes(replace(MEASURED, matmul_tflops={"fp32": 1.0, "bf16": 2.0})) == []


def test_products_are_run_in_fp32_and_nothing_else() -> None:
    seen = []

    def run(x: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        seen.append((x.dtype, y.dtype, out_dtype))
        return x @ y

    x = torch.ones(4, 4)
    rows = [product("bf16"), product("fp32", "b"), replace(product("bf16", "c"), op="aten::add")]
    samples = {row.kind: Sample(row, run, (x.bfloat16(), x.bfloat16()), {"out_dtype": torch.bfloat16}) for row in rows}
    kinds = {row.kind: [n] for n, row in enumerate(rows)}
    call_us = dict.fromkeys(kinds, 1e6)
    found = shares_in_fp32(rows, kinds, samples, call_us, ["bf16"], CPU, Deadline())
    assert list(found) == [0]
    assert 0 < found[0] < 0.1
    assert set(seen) == {(torch.float32, torch.float32, torch.float32)}
    assert shares_in_fp32(rows, kinds, samples, call_us, ["bf16"], CPU, Deadline(0.5)) == {}


@pytest.mark.parametrize(("share", "saved_us"), [(0.25, 1500.0), (1.5, None)])
def test_it_is_the_first_remedy(share: float, saved_us: float | None) -> None:
    finding = find(product("bf16"), MACHINE.roofs(), None, time_us=2000.0)
    step = ObservedStep(
        device=CPU, ceilings=MEASURED, step=StepEvidence(time_us=2500.0, idle_us={"host": 100.0}), findings=[finding], calls=[],
        kept=frozenset(), busy_us=2000.0, launches=2, wider={0: share},
    )  # fmt: skip
    found = [remedy for remedy in propose(step) if remedy.name == "wider dtype: fp32"]
    assert [remedy.predicted_us for remedy in found] == ([] if saved_us is None else [saved_us])
    if found:
        assert propose(step)[0] is not None
        assert max(propose(step), key=lambda remedy: remedy.predicted_us).name == "wider dtype: fp32"
        assert "products in bf16 take 4.0 times as long here as in fp32" in found[0].how
