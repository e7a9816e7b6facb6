"""A machine as it might be, and a stopwatch that pretends to time on it: no test of a plan reads a clock."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rooftile.hardware.ceilings import Ceilings
from rooftile.planning.costs import DeviceCeilings
from rooftile.planning.timing import TimedCalls

# 10 GB/s, 0.1 TFLOP/s in fp32 and twice that in bf16, 5 µs for a launch
CEILINGS = Ceilings(
    device="made up", copy_gbs=10.0, matmul_tflops={"fp64": 0.05, "fp32": 0.1, "bf16": 0.2, "fp16": 0.2}, cache_gbs=40.0,
    fma_tflops=0.1, special_gops=1.0, launch_us=5.0, operator_us=5.0, node_us=None, date="2026-01-01",
)  # fmt: skip
CPU = torch.device("cpu")


class Pretended:
    """Runs each call once, and says the time that the ceilings give, times a factor."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.calls = factor, 0
        self._machine = DeviceCeilings(CPU, CEILINGS)

    def us(self, works: Sequence[TimedCalls]) -> list[float]:
        for work in works:
            for run in work.runs:
                run()
        self.calls += len(works)
        return [self.factor * self._machine.us(work.passes) for work in works]
