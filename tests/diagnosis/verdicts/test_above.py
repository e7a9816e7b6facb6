"""A row above its roof says why it may be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rooftile.diagnosis.verdicts.above import is_above, why_above
from rooftile.hardware.ceilings import Ceilings
from tests.diagnosis.machine import Machine, Work, finding

MACHINE = Machine(flops_per_us=1e6, bytes_per_us=1e5, cache_bytes_per_us=2e5, fixed_us=1.0)
QUIET = Ceilings(
    device="a machine", copy_gbs=100.0, matmul_tflops={"fp32": 1.0}, cache_gbs=200.0, fma_tflops=1.0, special_gops=1.0,
    launch_us=1.0, operator_us=1.0, node_us=None, date="", busy_cores={"copy_gbs": 0.0},
)  # fmt: skip


def faster(share: float, *, bytes: float, flops: float, op: str = "aten::x"):
    """Returns a finding that seems to reach a share of its roof."""
    its = finding(MACHINE, Work(bytes=bytes, flops=flops), op=op)
    model = replace(its.verdict.model, time_us=(its.verdict.model.roof_us or 0.0) / share)
    return replace(its, verdict=replace(its.verdict, model=model))


@pytest.mark.parametrize("share", [0.9, 1.04, 1.3])
def test_a_row_is_above_from_five_percent(share: float) -> None:
    found = faster(share, bytes=1e6, flops=9e9)
    assert is_above(found) == (share > 1.05)
    assert bool(why_above([found], QUIET)) == (share > 1.05)
    assert not is_above(replace(found, time_us=900.0))


def test_the_reason_fits_the_unit() -> None:
    conv, copy = (
        faster(2.1, bytes=1e6, flops=9e9, op="aten::mkldnn_convolution"),
        faster(1.3, bytes=9e8, flops=1e6, op="aten::add"),
    )
    by_conv, by_copy = why_above([conv, copy], QUIET)
    assert by_conv.startswith("mkldnn_convolution seem to reach 210 % of the fp32 roof")
    assert "Winograd" in by_conv
    assert "cache" in by_copy
    (product,) = why_above([faster(1.2, bytes=1e6, flops=9e9)], replace(QUIET, busy_cores={"fp32 product": 1.5}))
    assert "the roof was measured while other programs kept 1.5 of" in product
