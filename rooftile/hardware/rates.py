"""Measures one rate of this machine each. `hardware.ceilings` keeps the results.

Copies count bytes read and bytes written. Matrix products run on random data, because zeros draw less power and can run
faster. A CPU's rates in the cache are the rates of one core times the threads: parallel regions on cores that are busy elsewhere
would cost more than what is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rooftile.hardware.clock import captured
from rooftile.hardware.device import describe
from rooftile.runtime.devices import capability

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Work = Callable[[], Any]


def copy(device: torch.device) -> float:
    """Returns bytes per second of a copy far larger than any cache."""
    size = (1 << 30) if device.type == "cuda" else (1 << 28)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(device, lambda: target.copy_(source))


def cache_copy(device: torch.device) -> float:
    """Returns bytes per second of a copy within the L2: a GPU's, or each core's own on a CPU."""
    # source and target take half of it, so that neither evicts the other
    size = max((describe(device).l2_bytes or 1 << 20) // 4, 1 << 16)
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds_in_cache(device, lambda: target.copy_(source))


def matmuls(device: torch.device) -> dict[str, Callable[[], float]]:
    """Returns for each dtype what measures the FLOPs per second of a square matrix product.

    fp64, fp32, bf16, fp16; fp8 and int8 on GPUs with them. A multiply and an add of int8 count as FLOPs, too.
    """
    found: dict[str, Callable[[], float]] = {name: partial(_matmul, dtype, device) for name, dtype in DTYPES.items()}
    # AMD's first fp8 format is a different one
    has_fp8 = capability(device) >= (8, 9)
    if has_fp8:
        found["fp8"] = partial(_fp8_matmul, device)
    if has_int8(device):
        found["int8"] = partial(_int8_matmul, device)
    return found


def has_int8(device: torch.device) -> bool:
    """Whether PyTorch has a product of int8 that the device's matrix units compute."""
    return capability(device) >= (8, 0)


def multiply_adds(device: torch.device, product: float) -> float:
    """Returns FLOPs per second of fp32 multiply-adds outside of matrix units.

    product: of fp32 products, which a CPU computes in the same vector units. A GPU without Triton takes it too: cuBLAS computes
    them with the same instructions.
    """
    if device.type != "cuda" or not describe(device).triton:
        return product
    from rooftile.hardware.arithmetic_kernels import REPEATS, repeat_multiply_adds

    x = torch.rand(1 << 22, device=device)
    return 2 * REPEATS * x.numel() / _seconds(device, lambda: repeat_multiply_adds(x))


def exponentials(device: torch.device) -> float:
    """Returns exponentials of fp32 per second, of numbers that are in the cache."""
    if device.type == "cuda" and describe(device).triton:
        from rooftile.hardware.arithmetic_kernels import REPEATS, repeat_exponentials

        x = torch.rand(1 << 22, device=device)
        return REPEATS * x.numel() / _seconds(device, lambda: repeat_exponentials(x))
    x = torch.rand(1 << 14 if device.type == "cpu" else 1 << 22, device=device)
    y = torch.empty_like(x)
    return x.numel() / _seconds_in_cache(device, lambda: torch.exp(x, out=y))


def launch_us(device: torch.device, count: int = 300) -> float:
    """Returns the time per operator of a sequence of small ones."""
    return _seconds(device, _chain(device, count)) / count * 1e6


def operator_us(device: torch.device, count: int = 300) -> float:
    """Returns the host's time to call one small operator and allocate its result."""
    x = torch.ones(16, device=device)

    def calls() -> None:
        for _ in range(count):
            torch.add(x, 1.0)

    return _host_seconds(calls, wait=device.type == "cuda") / count * 1e6


def node_us(device: torch.device, count: int = 300) -> float | None:
    """Returns the time per small kernel of a CUDA graph; None on a CPU."""
    if device.type != "cuda":
        return None
    return _seconds(device, captured(_chain(device, count)).replay) / count * 1e6


def _chain(device: torch.device, count: int) -> Work:
    x = torch.zeros(16, device=device)

    def chain() -> None:
        for _ in range(count):
            x.add_(1.0)

    return chain


def _matmul(dtype: torch.dtype, device: torch.device) -> float:
    n = _matmul_size(dtype, device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return 2 * n**3 / _seconds(device, lambda: a @ b)
    finally:
        torch.set_float32_matmul_precision(precision)


def _matmul_size(dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cuda":
        return 4096 if dtype in (torch.float32, torch.float64) else 8192
    # a CPU without half-precision instructions may be a hundred times slower; it has those for fp32 and fp64, and a product that
    # is slow in them was disturbed
    small = 256
    if dtype.itemsize >= 4:
        return 1536
    a = torch.randn(small, small).to(dtype)
    return 1536 if _host_seconds(lambda: a @ a) < 2e-3 else small


def _fp8_matmul(device: torch.device) -> float:
    n = 8192
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    work = lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2 * n**3 / _seconds(device, work)


def _int8_matmul(device: torch.device) -> float:
    n = 8192
    a, b = (torch.randint(-127, 128, (n, n), dtype=torch.int8, device=device) for _ in range(2))
    return 2 * n**3 / _seconds(device, lambda: torch._int_mm(a, b.t()))


def _seconds(device: torch.device, work: Work) -> float:
    return _cuda_seconds(work) if device.type == "cuda" else _host_seconds(work)


def _seconds_in_cache(device: torch.device, work: Work, count: int = 50) -> float:
    """Returns the time of one of many runs, all threads together, on the same small tensors."""

    def runs() -> None:
        for _ in range(count):
            work()

    if device.type == "cuda":
        return _cuda_seconds(captured(runs).replay) / count
    with one_thread() as threads:
        return _host_seconds(runs, rounds=10) / count / threads


@contextmanager
def one_thread() -> Iterator[int]:
    """Lets torch compute in one thread, and says how many it had."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def _cuda_seconds(work: Work, rounds: int = 10) -> float:
    """Returns the median time of single runs between CUDA events, after warm-up."""
    for _ in range(3):
        work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, stop in marks:
        start.record()
        work()
        stop.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(stop) for start, stop in marks)) / 1e3


def _host_seconds(work: Work, rounds: int = 5, *, wait: bool = False) -> float:
    """Returns the fastest of a few runs: on shared cores it was disturbed least. wait: for the GPU, before each run."""
    work()
    taken = []
    for _ in range(rounds):
        if wait:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
