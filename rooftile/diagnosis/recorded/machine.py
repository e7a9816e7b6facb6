"""The machine of a trace, and the ceilings that its operators are compared with: this machine's, a datasheet's, or none."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rooftile.diagnosis.recorded.file import RecordedTrace
from rooftile.diagnosis.recorded.step import RecordedStep
from rooftile.errors import InvalidInput
from rooftile.hardware import ceilings
from rooftile.hardware.ceilings import Ceilings
from rooftile.hardware.chips import CHIPS, Chip, chip_named
from rooftile.hardware.device import describe

# products that run in TF32 have one of these words in their kernels' names
TF32 = ("tf32", "s1688gemm")


class TraceMachine(NamedTuple):
    """A machine that a trace was recorded on."""

    values: dict[str, Any]  # as in a diagnosis
    device: torch.device
    ceilings: Ceilings
    note: str  # says where the ceilings come from
    is_here: bool

    def known(self) -> dict[str, Any]:
        """Returns its ceilings as in a diagnosis, without those that no datasheet has."""
        if self.is_here:
            return self.ceilings.json()
        rates = {name: rate for name, rate in self.ceilings.matmul_tflops.items() if rate}
        known = {"device": self.ceilings.device, "kind": self.ceilings.kind}
        own = {"copy_gbs": self.ceilings.copy_gbs, "matmul_tflops": rates, "fma_tflops": self.ceilings.fma_tflops}
        return known | {name: value for name, value in own.items() if value}


def machine_of(trace: RecordedTrace, step: RecordedStep, device_name: str | None = None) -> TraceMachine:
    """Returns the machine of a trace.

    device_name: a GPU whose datasheet is taken, such as "H100"; None takes what the trace says.

    Raises InvalidInput if no datasheet has that name.
    """
    kind = "cuda" if step.on_gpu else "cpu"
    if device_name is not None:
        chip = next((one for one in CHIPS if one.name == device_name), None) or chip_named(device_name)
        if chip is None:
            raise InvalidInput(f"no datasheet of {device_name!r} is known; has {', '.join(one.name for one in CHIPS)}")
        if not step.on_gpu:
            raise InvalidInput(f"{trace.name} has no kernels of a GPU, so it has no use for a datasheet; leave the device out")
        return _by_datasheet(_described(_device(trace, step)) | {"name": chip.name}, chip)
    if kind == "cpu":
        if trace.host and trace.host == platform.node():
            return _here(torch.device("cpu"), "the trace is of this machine, whose ceilings were measured")
        values = {"name": "the CPU of another machine", "type": "cpu"}
        words = "the trace is of a CPU of another machine: its operators have counts and times, and no bound; diagnose it there"
        return TraceMachine(values, torch.device("cpu"), ceilings_of(None, values["name"]), words, False)
    values = _described(_device(trace, step))
    if (own := _same_gpu(values)) is not None:
        return _here(own, f"the trace is of a GPU as this machine has it, {values['name']}, whose ceilings were measured here")
    return _by_datasheet(values, chip_named(values["name"]))


def _here(device: torch.device, words: str) -> TraceMachine:
    return TraceMachine(describe(device).json(), device, ceilings.measure_when_quieter(device), words, True)


def _by_datasheet(values: dict[str, Any], chip: Chip | None) -> TraceMachine:
    if chip is None:
        words = (
            f"no datasheet of {values['name']!r} is known: operators have counts and times, and no bound; name a GPU by --device"
        )
    else:
        words = (
            f"ceilings are of the datasheet of {chip.name}, which no program quite reaches; it says nothing of special "
            "functions, caches and launches"
        )
    return TraceMachine(values, torch.device("cuda"), ceilings_of(chip, values["name"]), words, False)


def ceilings_of(chip: Chip | None, name: str) -> Ceilings:
    """Returns the ceilings of a datasheet; what it does not say has the rate 0, which stands for unknown."""
    dtypes = ("fp32", "bf16", "fp16", "fp8")
    rates = {dtype: (chip and getattr(chip, f"{dtype}_tflops")) or 0.0 for dtype in dtypes}
    return Ceilings(
        device=chip.name if chip else name, kind="datasheet" if chip else "none",
        copy_gbs=float(chip.bandwidth_gbs) if chip else 0.0, matmul_tflops=rates, cache_gbs=0.0,
        fma_tflops=chip.fp32_tflops if chip else 0.0, special_gops=0.0, launch_us=0.0, operator_us=0.0, node_us=None, date="",
    )  # fmt: skip


def in_tf32(kernels: Sequence[str]) -> bool:
    """Whether an fp32 product has run in TF32, by the names of its kernels."""
    return any(word in kernel for kernel in kernels for word in TF32)


def _device(trace: RecordedTrace, step: RecordedStep) -> dict[str, Any]:
    """Returns what the trace says of the GPU of its step; empty if it says nothing."""
    number = next((event.args["device"] for event in step.device if "device" in event.args), 0)
    return next((one for one in trace.devices if one.get("id") == number), {})


def _described(device: dict[str, Any]) -> dict[str, Any]:
    major, minor = device.get("computeMajor"), device.get("computeMinor")
    own = {
        "arch": f"sm{major}{minor}" if isinstance(major, int) and isinstance(minor, int) else None,
        "memory_bytes": _whole(device.get("totalGlobalMem")), "cores": _whole(device.get("numSms")),
    }  # fmt: skip
    return {"name": str(device.get("name") or "an unknown GPU"), "type": "cuda"} | {k: v for k, v in own.items() if v is not None}


def _whole(found: Any) -> int | None:
    return found if isinstance(found, int) else None


def _same_gpu(values: dict[str, Any]) -> torch.device | None:
    """Returns a GPU of this machine that is the trace's, by its name and memory; None without one."""
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        own = torch.cuda.get_device_properties(number)
        if own.name == values["name"] and values.get("memory_bytes") in (None, own.total_memory):
            return torch.device("cuda", number)
    return None
