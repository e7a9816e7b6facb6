"""Measured ceilings: the highest rates at which this machine copies memory and multiplies matrices.

Kernels are compared with these, not with the datasheet. Copy bandwidth counts bytes read and bytes written. Matrix
products run on random data, because zeros draw less power and can run faster. Results are stored in the user's cache
directory per device, torch version and thread count.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rooftile.errors import InvalidInput
from rooftile.hardware.chips import Rates
from rooftile.hardware.device import describe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The measured roofs of one device. fp32 products are true fp32, without tf32."""

    device: str  # its name
    kind: str = "measured"
    copy_gbs: float  # read plus written
    matmul_tflops: dict[str, float]  # by dtype: fp32, bf16, fp16, and fp8 if torch supports it
    launch_us: float  # host time per operation, for a sequence of small ones
    date: str

    def rates(self, dtype: str) -> Rates:
        """Returns the ceilings for a dtype: "fp32", "bf16", "fp16" or "fp8"."""
        if dtype not in self.matmul_tflops:
            raise InvalidInput(f"no ceiling was measured for {dtype!r} here; has {', '.join(self.matmul_tflops)}")
        return Rates(self.matmul_tflops[dtype] * 1e12, self.copy_gbs * 1e9)

    def json(self) -> dict[str, Any]:
        """Returns the fields as a JSON-serialisable dictionary."""
        return asdict(self)


_MEASURED: dict[str, Ceilings] = {}


def measure(device: torch.device | str, *, refresh: bool = False) -> Ceilings:
    """Returns the ceilings of a device: measured once (about a second on a GPU, under five on a CPU), then read from the cache.

    refresh: measure again, and store the new numbers.

    Example:
        >>> measure("cpu").copy_gbs > 0
        True
    """
    device = torch.device(device)
    path = _path(device)
    key = str(path)
    if not refresh and key not in _MEASURED and path.exists():
        _MEASURED[key] = Ceilings(**json.loads(path.read_text()))
    if refresh or key not in _MEASURED:
        _MEASURED[key] = _measure(device)
        _keep(path, _MEASURED[key])
    return _MEASURED[key]


def higher(a: Ceilings, b: Ceilings) -> Ceilings:
    """Returns the higher of two measurements of a device, rate by rate: load on the machine only ever lowers one."""
    rates = {name: max(rate, b.matmul_tflops.get(name, 0.0)) for name, rate in a.matmul_tflops.items()}
    return replace(b, copy_gbs=max(a.copy_gbs, b.copy_gbs), matmul_tflops=rates, launch_us=min(a.launch_us, b.launch_us))


def cache_directory() -> Path:
    """Returns the folder of stored measurements: $XDG_CACHE_HOME/rooftile, or ~/.cache/rooftile."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rooftile"


def _path(device: torch.device) -> Path:
    here = describe(device)
    threads = str(torch.get_num_threads()) if device.type == "cpu" else ""
    # the field names are part of the key, so that another version of this class does not read this file
    words = [here.name, here.uuid, here.torch, threads, *(field.name for field in fields(Ceilings))]
    return cache_directory() / f"ceilings-{hashlib.sha256('|'.join(words).encode()).hexdigest()[:16]}.json"


def _keep(path: Path, ceilings: Ceilings) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # replace atomically: a concurrent reader sees the old file or the new one
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(ceilings.json()) + "\n")
        unfinished.replace(path)
    except OSError as error:
        warnings.warn(f"could not store the measured ceilings: {error}", stacklevel=3)


def _measure(device: torch.device) -> Ceilings:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _measure_current(device)
    return _measure_current(device)


def _measure_current(device: torch.device) -> Ceilings:
    seconds = _cuda_seconds if device.type == "cuda" else _host_seconds
    rates = {name: _matmul(dtype, device, seconds) for name, dtype in DTYPES.items()}
    # AMD's first fp8 format is a different one
    has_fp8 = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    if has_fp8:
        rates["fp8"] = _fp8_matmul(device, seconds)
    return Ceilings(
        device=describe(device).name,
        copy_gbs=round(_copy(device, seconds) / 1e9, 2),
        matmul_tflops={name: round(flops / 1e12, 4) for name, flops in rates.items()},
        launch_us=round(_launch_us(device), 3),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _copy(device: torch.device, seconds: Callable[[Callable[[], Any]], float]) -> float:
    """Measures bytes per second, read plus written, of a copy far larger than any cache."""
    size = (1 << 30) if device.type == "cuda" else (1 << 28)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source))


def _matmul(dtype: torch.dtype, device: torch.device, seconds: Callable[[Callable[[], Any]], float]) -> float:
    n = _matmul_size(dtype, device)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return 2 * n**3 / seconds(lambda: a @ b)
    finally:
        torch.set_float32_matmul_precision(precision)


def _matmul_size(dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cuda":
        return 4096 if dtype == torch.float32 else 8192
    # a CPU without half-precision instructions may be a hundred times slower
    small = 256
    a = torch.randn(small, small).to(dtype)
    return 1536 if _host_seconds(lambda: a @ a, rounds=2) < 2e-3 else small


def _fp8_matmul(device: torch.device, seconds: Callable[[Callable[[], Any]], float]) -> float:
    n = 8192
    a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return 2 * n**3 / seconds(lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))


def _launch_us(device: torch.device, count: int = 300) -> float:
    x = torch.zeros(16, device=device)

    def chain() -> None:
        for _ in range(count):
            x.add_(1.0)

    seconds = _cuda_seconds if device.type == "cuda" else _host_seconds
    return seconds(chain) / count * 1e6


def _cuda_seconds(work: Callable[[], Any], rounds: int = 10) -> float:
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


def _host_seconds(work: Callable[[], Any], rounds: int = 5) -> float:
    """Returns the fastest of a few runs: on shared cores it was disturbed least."""
    work()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
