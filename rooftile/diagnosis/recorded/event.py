"""One event of a Chrome trace, which answers what an event of a live profiler does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rooftile.diagnosis.watching.compiled import NAMESPACE, PREFIXES
from rooftile.errors import InvalidInput

DeviceType = torch._C._autograd.DeviceType
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# a diagnosis reads these names; older versions of torch wrote others
CATEGORIES = {name: name for name in ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", *DEVICE)} | {
    "Operator": "cpu_op", "Runtime": "cuda_runtime", "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset",
}  # fmt: skip
NONE: dict[str, Any] = {}


class TraceEvent:
    """An event that has a beginning and an end; `category` is one of the values of `CATEGORIES`."""

    __slots__ = ("_duration", "_name", "_start", "args", "category", "thread")

    def __init__(self, found: Mapping[str, Any], category: str) -> None:
        name = str(found.get("name", ""))
        # the host's function of a kernel that torch.compile has generated has the kernel's name
        is_generated = category == "cpu_op" and name.startswith(PREFIXES)
        self._name = f"{NAMESPACE}::{name}" if is_generated else name
        self._start, self._duration = _ns(found, "ts"), _ns(found, "dur")
        self.category, self.thread = category, f"{found.get('pid')}/{found.get('tid')}"
        args = found.get("args")
        self.args: dict[str, Any] = args if isinstance(args, dict) else NONE

    def part(self, name: str, start_ns: int, end_ns: int) -> TraceEvent:
        """Returns a part of this event's time as an operator's event of its own."""
        found = TraceEvent({"name": name, "ts": 0}, "cpu_op")
        found._start, found._duration, found.thread = start_ns, end_ns - start_ns, self.thread
        return found

    @property
    def on_device(self) -> bool:
        return self.category in DEVICE

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._duration

    def end_ns(self) -> int:
        return self._start + self._duration

    def device_type(self) -> Any:
        return DeviceType.CUDA if self.category in DEVICE else DeviceType.CPU

    def start_thread_id(self) -> object:
        return self.thread

    def is_user_annotation(self) -> bool:
        return self.category == "user_annotation"

    def linked_correlation_id(self) -> int:
        """The number of the operator that asked for a kernel; 0 unknown."""
        return _number(self.args.get("External id", self.args.get("external id")))

    def correlation_id(self) -> int:
        """The number that a kernel and its launch share; of an operator its own number."""
        return self.linked_correlation_id() if self.category == "cpu_op" else _number(self.args.get("correlation"))

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of its tensors, also of the tensors in lists; none where no shapes were recorded."""
        return [shape for dims in listed(self.args, "Input Dims") for shape in shapes_in(dims)]


def listed(args: Mapping[str, Any], name: str) -> list[Any]:
    """Returns a list among the arguments of an event; empty where there is none."""
    found = args.get(name)
    return found if isinstance(found, list) else []


def shapes_in(dims: Any) -> Iterator[tuple[int, ...]]:
    """Yields the shape of a tensor, or the shapes of a list of tensors; a single number has no shape."""
    for one in [dims, *dims] if isinstance(dims, list) else ():
        if isinstance(one, list) and one and all(isinstance(n, int) for n in one):
            yield tuple(one)


def _number(found: Any) -> int:
    return found if isinstance(found, int) else 0


def _ns(found: Mapping[str, Any], name: str) -> int:
    us = found.get(name, 0 if name == "dur" else None)
    if isinstance(us, bool) or not isinstance(us, int | float) or not math.isfinite(us) or (name == "dur" and us < 0):
        raise InvalidInput(
            f"the trace is damaged: the event {found.get('name')!r} has {name} {us!r}, not a time in µs; record it again"
        )
    return round(us * 1000)
