"""A description of this machine's compute device and its software."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rooftile.errors import InvalidInput
from rooftile.runtime.devices import arch


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A compute device and its software, in plain values."""

    name: str
    type: str  # "cpu" or "cuda"
    arch: str  # as in a Spec: "cpu", "sm90"
    uuid: str  # the GPU's id, or the host name for a CPU
    memory_bytes: int
    cores: int  # streaming multiprocessors of a GPU; cores that this process may use of a CPU
    l2_bytes: int  # 0 if unknown
    driver: str  # the GPU driver's version, or the kernel's release for a CPU
    torch: str
    triton: str  # "" if absent
    python: str

    def json(self) -> dict[str, Any]:
        """Returns the fields as a JSON-serialisable dictionary."""
        return asdict(self)


def device_of(word: str) -> torch.device:
    """Returns the torch device for `--device`: "cpu", "cuda", "cuda:1", or "auto" for CUDA if there is a GPU.

    Raises InvalidInput if the device is absent.
    """
    if word == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = word.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise InvalidInput(f"device is {word!r}; must be cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("device is 'cuda', and torch finds no CUDA device here; use cpu, or a CUDA build of torch")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device is {word!r}; this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return torch.device(word)


def describe(device: torch.device | str) -> Device:
    """Describes a torch device.

    Example:
        >>> describe("cpu").arch
        'cpu'
    """
    device = torch.device(device)
    software = {"torch": torch.__version__, "triton": _triton_version(), "python": platform.python_version()}
    if device.type == "cuda":
        seen = torch.cuda.get_device_properties(device)
        return Device(
            name=seen.name,
            type="cuda",
            arch=arch(device),
            uuid=str(getattr(seen, "uuid", "")),
            memory_bytes=seen.total_memory,
            cores=seen.multi_processor_count,
            l2_bytes=getattr(seen, "L2_cache_size", 0),
            driver=_driver_version(),
            **software,
        )
    return Device(
        name=_cpu_name(),
        type=device.type,
        arch=arch(device),
        uuid=platform.node(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        l2_bytes=_cpu_l2_bytes(),
        driver=platform.release(),
        **software,
    )


def _triton_version() -> str:
    # read the version from package metadata, because importing Triton is slow
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _driver_version() -> str:
    """The GPU driver's version as nvidia-smi says it; "unknown" where there is no nvidia-smi to ask."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown"


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_l2_bytes() -> int:
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (index / "level").read_text().strip() == "2":
            size = (index / "size").read_text().strip()
            return int(size.rstrip("KMG")) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1], 1)
    return 0
