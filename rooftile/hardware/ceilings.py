"""Measured ceilings: the highest rates at which this machine moves memory and computes, and the least cost of an operator.

Kernels are compared with these, not with the datasheet. `hardware.rates` measures; results are stored in the user's cache
directory per device, torch version and thread count.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from rooftile.errors import InvalidInput
from rooftile.hardware import load, rates
from rooftile.hardware.chips import Rates
from rooftile.hardware.device import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The measured roofs of one device. fp32 products are true fp32, without tf32."""

    device: str  # its name
    kind: str = "measured"
    copy_gbs: float  # read plus written
    matmul_tflops: dict[str, float]  # by dtype: fp64, fp32, bf16, fp16, and on GPUs that have them fp8, int8
    cache_gbs: float  # read plus written: from a GPU's L2; from a slice in each core's L2, all cores together, on a CPU
    fma_tflops: float  # multiply-adds outside of matrix units; 2 FLOPs each
    special_gops: float  # exponentials in fp32, in 1e9 per second
    launch_us: float  # host time per operation, for a sequence of small ones
    operator_us: float  # the host's time for one small operator and its result, waiting for no device
    node_us: float | None  # the time of a small kernel in a CUDA graph; None on a CPU
    date: str
    # cores that other programs kept busy while each was measured, by the names above and "fp32 product"; without what is unknown
    busy_cores: dict[str, float] = field(default_factory=dict)

    def rates(self, dtype: str) -> Rates:
        """Returns the ceilings for a dtype: "fp32", "bf16", "fp16", "fp8" or "int8"."""
        if dtype not in self.matmul_tflops:
            raise InvalidInput(f"no ceiling was measured for {dtype!r} here; has {', '.join(self.matmul_tflops)}")
        return Rates(self.matmul_tflops[dtype] * 1e12, self.copy_gbs * 1e9)

    def json(self) -> dict[str, Any]:
        """Returns the fields as a JSON-serialisable dictionary."""
        return asdict(self)


_MEASURED: dict[str, Ceilings] = {}
# ceilings stay good if others kept less than this share of the cores busy; seconds of a look at the load
BUSY, LOOK_S = 0.1, 0.3
# devices whose load this process has looked at
_looked_at: set[str] = set()
Say = Callable[[str], None] | None


def measure(device: torch.device | str, *, refresh: bool = False, say: Say = None) -> Ceilings:
    """Returns the ceilings of a device: measured once (a few seconds), then read from the cache.

    refresh: measure again, and store the new numbers.
    say: is called with words about each step, if something is measured.

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
        _MEASURED[key] = _measure(device, say)
        _keep(path, _MEASURED[key])
    return _MEASURED[key]


def measure_when_quieter(device: torch.device | str, *, say: Say = None) -> Ceilings:
    """Returns the ceilings of a device, measured again if other programs kept it much busier at that time than now."""
    device = torch.device(device)
    found = measure(device, say=say)
    worst = max(found.busy_cores.values(), default=0.0)
    if worst <= BUSY * load.cores() or str(device) in _looked_at:
        return found
    _looked_at.add(str(device))
    meter = load.Meter()
    time.sleep(LOOK_S)
    others = meter.others()
    return found if others is None or others > worst / 2 else measure_again(device, say=say)


def measure_again(device: torch.device | str, *, say: Say = None) -> Ceilings:
    """Measures once more, and keeps the higher of each rate: for a time that is shorter than the ceilings allow."""
    device = torch.device(device)
    path = _path(device)
    before = measure(device)
    _MEASURED[str(path)] = higher(before, _measure(device, say))
    _keep(path, _MEASURED[str(path)])
    return _MEASURED[str(path)]


def higher(a: Ceilings, b: Ceilings) -> Ceilings:
    """Returns the higher of two measurements of a device, rate by rate: load on the machine only ever lowers one."""
    products = {name: max(rate, b.matmul_tflops.get(name, 0.0)) for name, rate in a.matmul_tflops.items()}
    faster = {name: max(getattr(a, name), getattr(b, name)) for name in ("copy_gbs", "cache_gbs", "fma_tflops", "special_gops")}
    shorter = {name: min(getattr(a, name), getattr(b, name)) for name in ("launch_us", "operator_us")}
    nodes_us = [us for us in (a.node_us, b.node_us) if us is not None]
    chosen = replace(b, matmul_tflops=products, node_us=min(nodes_us, default=None), **faster, **shorter)
    return replace(chosen, busy_cores=_loads(chosen, a, b))


def _loads(chosen: Ceilings, a: Ceilings, b: Ceilings) -> dict[str, float]:
    """Returns the load under which each of the chosen ceilings was measured."""
    found: dict[str, float] = {}
    for name in b.busy_cores | a.busy_cores:
        product = name.removesuffix(" product")
        values = [of.matmul_tflops.get(product) if product != name else getattr(of, name) for of in (chosen, b)]
        source = b if values[0] == values[1] else a
        found |= {name: source.busy_cores[name]} if name in source.busy_cores else {}
    return found


def cache_directory() -> Path:
    """Returns the folder of stored measurements: $XDG_CACHE_HOME/rooftile, or ~/.cache/rooftile."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rooftile"


def _path(device: torch.device) -> Path:
    here = describe(device)
    threads = str(torch.get_num_threads()) if device.type == "cpu" else ""
    # the key names all measurements, so that another version of this class does not read this file
    measured = [field.name for field in fields(Ceilings)] + ["int8"] * rates.has_int8(device)
    words = [here.name, here.uuid, here.torch, threads, *measured]
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


def _measure(device: torch.device, say: Say) -> Ceilings:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _measure_current(device, say)
    return _measure_current(device, say)


def _measure_current(device: torch.device, say: Say) -> Ceilings:
    """Measures one ceiling after another, each with the load that others put on the machine meanwhile."""
    busy: dict[str, float] = {}
    meter = load.Meter()

    def one(name: str, words: str, work: Callable[[], Any]) -> Any:
        if say is not None:
            say(f"measuring {words}")
        meter.restart()
        found = work()
        if (others := meter.others()) is not None:
            busy[name] = others
        return found

    products = {name: one(f"{name} product", f"products in {name}", work) / 1e12 for name, work in rates.matmuls(device).items()}
    node_us = one("node_us", "kernels of a CUDA graph", lambda: rates.node_us(device)) if device.type == "cuda" else None
    fp32 = products["fp32"] * 1e12
    return Ceilings(
        device=describe(device).name,
        copy_gbs=round(one("copy_gbs", "copies in memory", lambda: rates.copy(device)) / 1e9, 2),
        # four digits, however slow a dtype is
        matmul_tflops={name: float(f"{rate:.4g}") for name, rate in products.items()},
        cache_gbs=round(one("cache_gbs", "copies in the cache", lambda: rates.cache_copy(device)) / 1e9, 2),
        fma_tflops=float(f"{one('fma_tflops', 'multiply-adds', lambda: rates.multiply_adds(device, fp32)) / 1e12:.4g}"),
        special_gops=round(one("special_gops", "exponentials", lambda: rates.exponentials(device)) / 1e9, 4),
        launch_us=round(one("launch_us", "small operators", lambda: rates.launch_us(device)), 3),
        operator_us=round(one("operator_us", "one small operator", lambda: rates.operator_us(device)), 3),
        node_us=None if node_us is None else round(node_us, 3),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        busy_cores=busy,
    )
