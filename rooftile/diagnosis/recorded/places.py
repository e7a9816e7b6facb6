"""Says where the host is in the program at a time of a trace: the module, the phase, and the user's function."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from rooftile.diagnosis.recorded.event import TraceEvent
from rooftile.diagnosis.recorded.step import COMPILED_GRAPH
from rooftile.diagnosis.watching.host_place import SAMPLE_SECONDS, WORKERS, HostPlace
from rooftile.diagnosis.watching.intervals import Interval

MODULE = "nn.Module: "
BACKWARD = "autograd::engine::evaluate_function"
# a function of Python in a trace: "train.py(12): train_step"
FUNCTION = re.compile(r"(.+)\((\d+)\): (.+)")
# a profiler leaves out the folder of a library, so that a file of Python's own has a bare name
OTHERS = frozenset({"torch", *sys.stdlib_module_names})
LONGEST_SAMPLES = 50_000


class TracePlace(NamedTuple):
    """The surroundings of the host at a time."""

    module: str = ""  # the classes from the outermost module to the innermost: "GPT.Block.Linear"
    phase: str = "forward"
    node: int | None = None  # the number of the autograd node that runs
    where: str = ""  # the user's function that runs: "train.py:12 (train_step)"
    annotation: str = ""  # the innermost range that the program or PyTorch has named

    @property
    def of_host(self) -> HostPlace:
        """The place, as a sampler of Python's stack gives it."""
        loads = ""
        if "DataLoader)#" in self.annotation:
            loads = "workers" if WORKERS in self.annotation else "here"
        return HostPlace(self.where or self.annotation, "", loads)


class Places:
    """Knows the place of the host at any time of a step, in each of its threads."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        self._around: defaultdict[object, list[TraceEvent]] = defaultdict(list)
        for event in events:
            if event.category in ("user_annotation", "python_function") or _numbered(event) is not None:
                self._around[event.thread].append(event)
        for its in self._around.values():
            its.sort(key=lambda e: (e.start_ns(), -e.duration_ns()))
        self._modules: dict[int, str] = {}
        for its in self._around.values():
            numbered = [e for e in its if e.category == "cpu_op" and not e.name().startswith(BACKWARD)]
            for event, place in zip(numbered, _sweep(its, [e.start_ns() for e in numbered]), strict=True):
                if place.phase == "forward" and place.module:
                    self._modules[_numbered(event) or 0] = place.module

    def of(self, events: Sequence[TraceEvent]) -> list[TracePlace]:
        """Returns the place at the beginning of each event. A backward belongs to the module whose forward made its node."""
        by_thread: defaultdict[object, list[int]] = defaultdict(list)
        for n, event in enumerate(events):
            by_thread[event.thread].append(n)
        found = [TracePlace()] * len(events)
        for thread, its in by_thread.items():
            its.sort(key=lambda n: events[n].start_ns())
            places = _sweep(self._around.get(thread, ()), [events[n].start_ns() for n in its])
            for n, place in zip(its, places, strict=True):
                found[n] = place._replace(module=place.module or self._modules.get(place.node or 0, ""))
        return found

    def samples(self, thread: object, window: Interval) -> list[tuple[int, HostPlace]]:
        """Returns the places of a thread at regular times, as a sampler of a live program does."""
        length = window[1] - window[0]
        every = max(1, length // LONGEST_SAMPLES, min(int(SAMPLE_SECONDS * 1e9), length // 1000))
        times = range(window[0], window[1], every)
        return [(at, place.of_host) for at, place in zip(times, _sweep(self._around.get(thread, ()), times), strict=True)]


def _sweep(around: Sequence[TraceEvent], times: Sequence[int]) -> list[TracePlace]:
    """Returns the place at each of some times; events and times are sorted."""
    found: list[TracePlace] = []
    open_: list[tuple[int, TracePlace]] = []
    n = 0
    for at in times:
        while n < len(around) and around[n].start_ns() <= at:
            event = around[n]
            while open_ and open_[-1][0] <= event.start_ns():
                open_.pop()
            open_.append((event.end_ns(), _inside(event, open_[-1][1] if open_ else TracePlace())))
            n += 1
        while open_ and open_[-1][0] <= at:
            open_.pop()
        found.append(open_[-1][1] if open_ else TracePlace())
    return found


def _inside(event: TraceEvent, outer: TracePlace) -> TracePlace:
    """Returns the place inside of an event that lies in another place."""
    name = event.name()
    if event.category == "cpu_op":
        if name.startswith(BACKWARD):
            return outer._replace(phase="backward", node=_numbered(event))
        return outer
    if event.category == "user_annotation":
        if name.startswith("Optimizer.step#"):
            return outer._replace(phase="optimiser")
        return outer if name.startswith(("ProfilerStep#", "Optimizer.", COMPILED_GRAPH)) else outer._replace(annotation=name)
    if name.startswith(MODULE):
        # layers of one kind are one row: "Linear_0" and "Linear_1" are of the class Linear
        word = name.removeprefix(MODULE).rpartition("_")[0]
        return outer._replace(module=f"{outer.module}.{word}" if outer.module else word)
    where = _users(name)
    return outer._replace(where=where) if where else outer


@cache
def _users(name: str) -> str:
    """Returns the place of a function that is the user's, or another library's than PyTorch; else ""."""
    found = FUNCTION.fullmatch(name)
    if found is None or found[1].startswith("<"):
        return ""
    first = found[1].lstrip("/").partition("/")[0].removesuffix(".py")
    is_own = first not in OTHERS and "/torch/" not in found[1] and "/lib/python" not in found[1].partition("site-packages")[0]
    return f"{found[1]}:{found[2]} ({found[3]})" if is_own else ""


def _numbered(event: TraceEvent) -> int | None:
    """The number of the autograd node that an operator makes, or runs; None without one."""
    found: Mapping[str, object] = event.args
    number = found.get("Sequence number") if event.category == "cpu_op" else None
    return number if isinstance(number, int) else None
