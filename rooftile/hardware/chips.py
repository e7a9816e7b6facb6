"""Datasheet numbers of GPUs, for orientation. `rooftile.hardware.ceilings` measures.

Rates are for dense operands (datasheets often print twice that, for 2:4 sparse ones) with fp32 accumulation, which
halves the fp16 and fp8 rates of GeForce cards. Bandwidth is the memory's, in GB/s of 1e9 bytes. L2 of the H200 and
B200 is the driver's value; their datasheets do not give it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from rooftile.errors import InvalidInput


class Rates(NamedTuple):
    """The two ceilings of a program: matrix FLOP/s in one dtype, and memory bandwidth."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One row of the table. A rate is None if the chip does not support the dtype."""

    name: str
    pattern: str  # a pattern for the name from torch.cuda.get_device_name
    arch: str  # as in a Spec: "sm90", "cpu"
    kind: str = "datasheet, dense"  # the source of the numbers
    memory_gb: float
    bandwidth_gbs: float
    fp32_tflops: float  # without matrix units
    bf16_tflops: float | None
    fp16_tflops: float | None
    fp8_tflops: float | None
    l2_mb: float
    cores: int  # streaming multiprocessors of a GPU, cores of a CPU
    shared_kb: int  # shared memory of one multiprocessor that kernels can use; 0 for a CPU

    def rates(self, dtype: str) -> Rates:
        """Returns the chip's rates for a dtype: "fp32", "bf16", "fp16" or "fp8"."""
        tflops = getattr(self, f"{dtype}_tflops", None)
        if tflops is None:
            raise InvalidInput(f"{self.name} has no datasheet rate for {dtype!r}; use one that its matrix units have")
        return Rates(tflops * 1e12, self.bandwidth_gbs * 1e9)


def _gpu(
    name: str, pattern: str, arch: str, memory_gb: float, bandwidth_gbs: float, fp32: float, half: float,
    fp8: float | None, l2_mb: float, cores: int, shared_kb: int,
) -> Chip:  # fmt: skip
    return Chip(
        name=name, pattern=pattern, arch=arch, memory_gb=memory_gb, bandwidth_gbs=bandwidth_gbs, fp32_tflops=fp32,
        bf16_tflops=half, fp16_tflops=half, fp8_tflops=fp8, l2_mb=l2_mb, cores=cores, shared_kb=shared_kb,
    )  # fmt: skip


# the first pattern that matches wins, so narrower names come first
# fmt: off
CHIPS: tuple[Chip, ...] = (
    #    name              pattern              arch     GB    GB/s  fp32   half    fp8    L2   SMs  shared
    _gpu("B200",           r"B200",             "sm100", 180, 7700,  75.0, 2250.0, 4500.0, 126, 148, 228),
    _gpu("GH200",          r"GH200",            "sm90",   96, 4000,  66.9,  989.4, 1978.9,  60, 132, 228),
    _gpu("H200 NVL",       r"H200 NVL",         "sm90",  141, 4800,  60.0,  835.5, 1670.5,  60, 132, 228),
    _gpu("H200",           r"H200",             "sm90",  141, 4800,  66.9,  989.4, 1978.9,  60, 132, 228),
    _gpu("H100 NVL",       r"H100 NVL",         "sm90",   94, 3938,  60.0,  835.5, 1670.5,  50, 132, 228),
    _gpu("H100 PCIe",      r"H100 PCIe",        "sm90",   80, 2039,  51.2,  756.5, 1513.0,  50, 114, 228),
    _gpu("H100 SXM",       r"H100",             "sm90",   80, 3352,  66.9,  989.4, 1978.9,  50, 132, 228),
    _gpu("A100 80GB PCIe", r"A100 80GB PCIe",   "sm80",   80, 1935,  19.5,  312.0, None,    40, 108, 164),
    _gpu("A100 80GB SXM",  r"A100-SXM\d-80GB",  "sm80",   80, 2039,  19.5,  312.0, None,    40, 108, 164),
    _gpu("A100 40GB",      r"A100",             "sm80",   40, 1555,  19.5,  312.0, None,    40, 108, 164),
    _gpu("A10G",           r"A10G",             "sm86",   24,  600,  31.5,   70.0, None,     6,  80, 100),
    _gpu("A10",            r"A10\b",            "sm86",   24,  600,  31.2,  125.0, None,     6,  72, 100),
    _gpu("L40S",           r"L40S",             "sm89",   48,  864,  91.6,  362.0, 733.0,   96, 142, 100),
    _gpu("L4",             r"L4\b",             "sm89",   24,  300,  30.3,  121.0, 242.5,   48,  58, 100),
    _gpu("RTX 6000 Ada",   r"RTX 6000 Ada",     "sm89",   48,  960,  91.1,  364.2, 728.5,   96, 142, 100),
    _gpu("RTX 5090",       r"RTX 5090",         "sm120",  32, 1792, 104.8,  209.5, 419.0,   96, 170, 100),
    _gpu("RTX 4090",       r"RTX 4090",         "sm89",   24, 1008,  82.6,  165.2, 330.3,   72, 128, 100),
    _gpu("RTX 3090",       r"RTX 3090",         "sm86",   24,  936,  35.6,   71.0, None,     6,  82, 100),
)
# fmt: on


def chip_named(device_name: str) -> Chip | None:
    """Returns the datasheet row of a GPU by its torch.cuda name; None if the table lacks it.

    >>> chip_named("NVIDIA H100 80GB HBM3").name
    'H100 SXM'
    """
    return next((chip for chip in CHIPS if re.search(rf"\b{chip.pattern}", device_name)), None)
