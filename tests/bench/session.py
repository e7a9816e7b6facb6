"""A run whose machine is known: the ceilings are round numbers, and nothing is measured."""

from __future__ import annotations

import torch

from rooftile.cost.session import Session
from rooftile.hardware.ceilings import Ceilings
from rooftile.hardware.device import describe

CEILINGS = Ceilings(
    device="d", copy_gbs=10.0, matmul_tflops={"fp32": 0.1, "bf16": 0.1, "fp16": 0.1}, cache_gbs=20.0, fma_tflops=0.1,
    special_gops=1.0, launch_us=1.0, operator_us=1.0, node_us=None, date="2026-01-01",
)  # fmt: skip
# `again` is given, so that no test measures this machine because it is faster than these ceilings
SESSION = Session(torch.device("cpu"), describe("cpu"), CEILINGS, "abc", "2026-01-02T03:04:05+00:00", again=CEILINGS)
