"""This machine's ceilings as the roofs of an operator."""

from __future__ import annotations

import time
from functools import cache
from statistics import median
from typing import Any

import torch

from rooftile.diagnosis.records import Operation
from rooftile.diagnosis.steps import wait_for
from rooftile.diagnosis.verdicts.roofs import Roofs
from rooftile.hardware import ceilings
from rooftile.hardware.ceilings import Ceilings

# bytes of an array that stays in the cache
CACHED = {"cpu": 2 << 20, "cuda": 20 << 20}


def roofs_of(operation: Operation, device: torch.device, measured: Ceilings) -> Roofs:
    """The roofs that an operator meets: by the dtype of its numbers, and whether they are products."""
    name = operation.op.split("::")[1]
    products = any(word in name for word in ("mm", "conv", "attention", "linear"))
    dtype = operation.dtype if operation.dtype in measured.matmul_tflops else "fp32"
    on_gpu = device.type == "cuda"
    peak = measured.matmul_tflops[dtype if products else "fp32"] * 1e12
    cache_rate, special_rate = _measured(device, torch.get_num_threads())
    return Roofs(
        memory="HBM" if on_gpu else "DRAM", bytes_per_s=measured.copy_gbs * 1e9, cache="L2" if on_gpu else "cache",
        cache_bytes_per_s=cache_rate, arithmetic="tensor" if on_gpu and products and dtype != "fp32" else "fp32",
        flops_per_s=peak, special_per_s=special_rate, fixed_us=0.0 if on_gpu else measured.launch_us,
        launch_us=measured.launch_us if on_gpu else 0.0,
    )  # fmt: skip


def of_json(device: torch.device, measured: Ceilings) -> dict[str, Any]:
    """The ceilings as the diagnosis writes them."""
    cache_rate, special_rate = _measured(device, torch.get_num_threads())
    return measured.json() | {"cache_gbs": round(cache_rate / 1e9, 2), "special_gops": round(special_rate / 1e9, 2)}


def measure(device: torch.device) -> Ceilings:
    """The ceilings of the device, from the cache if they were measured before."""
    return ceilings.measure(device)


@cache
def _measured(device: torch.device, threads: int) -> tuple[float, float]:
    """Bytes per second of a copy within the cache, and exponentials per second there, with so many threads of a CPU."""
    size = CACHED[device.type] // 4
    x = torch.rand(size, device=device)
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / _seconds(lambda: y.copy_(x), device)
    return copied, size / _seconds(lambda: torch.exp(x, out=y), device)


def _seconds(work: Any, device: torch.device, runs: int = 15, calls: int = 10) -> float:
    taken = []
    for _ in range(runs):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wait_for(device)
        taken.append((time.perf_counter() - start) / calls)
    return median(taken)
