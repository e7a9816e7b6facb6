"""One profiled step: how long each operator takes in the step, where the device waits, and for what.

A gap is a time in which nothing runs: no kernel on a GPU, no operator on a CPU. It has one cause:

    host        the host had not asked for the next kernel yet: Python, a data loader, a sleep
    exchange    ... because it waited for other processes, whose exchange ran meanwhile
    sync        ... because it waited for the device: .item(), a copy to the host
    copy        a copy between host and device runs, and no kernel
    dependency  the next kernel had been asked for in time, and the device was late

Times under the profiler are longer than without it, by a microsecond or two per operator: shares are read from here, and the
time of the step elsewhere.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rooftile.diagnosis.output.trace import pack
from rooftile.diagnosis.watching.compiled import NAMESPACE, GeneratedKernel, watched_kernels
from rooftile.diagnosis.watching.host_place import BETWEEN_NS, HostPlace, HostSampler, work_of_the_host
from rooftile.diagnosis.watching.intervals import Interval, Near, complement, length, union

CAUSES = ("host", "exchange", "sync", "copy", "dependency")
# exchanges between processes that a CPU's library makes in threads of its own
EXCHANGES = ("gloo:", "mpi:", "ucc:")
# names of CUDA's functions that wait for the device
WAITING = ("Synchronize", "cudaMemcpy")
# copies between host and device; one within the device is work like a kernel's
BETWEEN = ("Memcpy HtoD", "Memcpy DtoH")
# ranges of the autograd engine around a whole node and of FSDP around its hooks, in which Python may run or another process be
# waited for
RANGES = ("autograd::engine::", "FSDP::")

Lines = Sequence[tuple[int, HostPlace]]
OpKey = tuple[str, tuple[tuple[int, ...], ...]]  # an operator's name, and the shapes of its tensors


class Gap(NamedTuple):
    """A time in which the device had nothing to do."""

    start_ns: int
    end_ns: int
    cause: str
    where: str  # the user's line that ran meanwhile; "" unknown
    is_work: bool = False  # this line asks for no operator, and the gap is longer than the time between two operators

    @property
    def us(self) -> float:
        return (self.end_ns - self.start_ns) / 1e3


class Launch(NamedTuple):
    """Something that the host asked the device for."""

    host_us: float  # the host's own time since it asked for the one before, its waits left out
    device_us: float
    key: OpKey | None = None  # names the operator that asked; None where none is known
    waits: bool = False  # afterwards the host waited for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step as a profiler saw it."""

    wall_us: float
    busy_us: float  # something ran on the device
    launches: int  # kernels, copies and fills on a GPU, operators on a CPU
    op_us: dict[OpKey, float]  # per call, mean: on a GPU of its kernels, on a CPU of the operator
    op_calls: dict[OpKey, int]
    calls_us: Mapping[str, tuple[float, ...]]  # the time of each call, by the operator's name, in the order of the calls
    kernels: dict[OpKey, tuple[str, ...]]  # the names of its kernels; none on a CPU
    gaps: tuple[Gap, ...]
    start_ns: int
    launched: tuple[Launch, ...] = ()  # on a GPU, in the order in which the host asked
    tail_us: float = 0.0  # the host's time after the last of them
    replayed_us: float = 0.0  # kernels of CUDA graphs, which no operator asks for
    host_work: Mapping[HostPlace, float] = field(default_factory=dict)  # in µs, of gaps whose cause is the host
    steps: int = 1  # that `gaps` are of
    copied_us: float = 0.0  # copies between host and device beside which no kernel ran: in an operator's time and in a gap

    def us_of(self, op: str, shapes: tuple[tuple[int, ...], ...]) -> float:
        """Returns the time of one call of an operator; the mean of all its calls where these shapes are unknown."""
        us = self.op_us.get((op, shapes))
        if us is None:
            same = [(key, us) for key, us in self.op_us.items() if key[0] == op]
            calls = sum(self.op_calls[key] for key, _ in same)
            us = sum(us * self.op_calls[key] for key, us in same) / calls if calls else 0.0
        return us

    def kernels_of(self, op: str, shapes: tuple[tuple[int, ...], ...]) -> Sequence[str]:
        """Returns the names of an operator's kernels: by its shapes, as one operator has other kernels for other shapes."""
        names = self.kernels.get((op, shapes))
        if names is None:
            # a profiler names the shapes of some arguments in another way
            alike = [names for (other, _), names in self.kernels.items() if other == op]
            names = tuple(dict.fromkeys(name for its in alike for name in its))
        return names

    @property
    def idle_us(self) -> dict[str, float]:
        """The time without work by cause."""
        found = dict.fromkeys(CAUSES, 0.0)
        for gap in self.gaps:
            found[gap.cause] += gap.us / self.steps
        return found

    @property
    def lines(self) -> dict[str, float]:
        """The time without work by the user's line that ran meanwhile, in µs, longest first."""
        found: Counter[str] = Counter()
        for gap in self.gaps:
            if gap.where:
                found[gap.where] += gap.us / self.steps  # type: ignore[assignment]
        return dict(found.most_common())


class Profiled:
    """Profiles the step that runs in its block; `timeline` is there afterwards, and the profiler's own `trace`, packed.

    Args:
        device: where the step runs.
        names: gives the operators whose times are wanted, such as "aten::mm".
        lines: gives the lines that ask for operators.
    """

    timeline: Timeline
    trace: bytes

    def __init__(
        self, device: torch.device, names: Callable[[], Iterable[str]], lines: Callable[[], Iterable[str]] = tuple
    ) -> None:  # fmt: skip
        self._device, self._on_gpu = device, device.type == "cuda"
        self._names, self._asking = names, lines

    def __enter__(self) -> Profiled:
        # the profiler's library writes to the terminal when it starts
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
        self._profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.__enter__()
        self._kernels = watched_kernels(_named)
        self._kernels.__enter__()
        self._lines = HostSampler()
        self._lines.__enter__()
        if self._on_gpu:
            # the first kernel under a profiler waits until the driver is ready to record it
            torch.zeros(1, device=self._device)
            torch.cuda.synchronize(self._device)
        self._start = time.time_ns()
        return self

    def __exit__(self, *error: Any) -> None:
        host_end = time.time_ns()
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        end = time.time_ns()
        self._lines.__exit__()
        self._kernels.__exit__(*error)
        self._profiler.__exit__(*error)
        if error[0] is None:
            events = list(self._profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
            names = frozenset(self._names())
            host = self._start, host_end
            self.timeline = timeline_of(
                events, (self._start, end), host, self._lines.seen, self._on_gpu, lambda e: e.name() in names,
                frozenset(self._asking()),
            )  # fmt: skip
            self.trace = pack(self._profiler)


def _named(kernel: GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a generated kernel, of which the profiler knows nothing on a CPU, under its name."""
    with record_function(f"{NAMESPACE}::{kernel.name}"):
        return kernel(*args, **kwargs)


def timeline_of(
    events: Sequence[Any], window: Interval, asking: Interval, lines: Lines, on_gpu: bool,
    is_wanted: Callable[[Any], bool], asking_lines: Collection[str] = (),
) -> Timeline:  # fmt: skip
    """Returns the timeline of a step from the events of a profiler, or from events of a trace, which answer the same questions.

    Args:
        events: of the host and the device, in any order.
        window: the step; on a GPU in the time of the device.
        asking: the part of it in which the host asks for kernels; on a GPU it may begin before the device does.
        lines: samples of the host's place.
        on_gpu: where the step runs.
        is_wanted: whether an event is an operator whose time is wanted; of operators in each other the outermost is taken.
        asking_lines: the lines that ask for operators.
    """
    host = [e for e in events if e.device_type() == torch._C._autograd.DeviceType.CPU]
    around = min(window[0], asking[0]), max(window[1], asking[1])
    here = [e for e in host if "::" in e.name() and not e.name().startswith(RANGES) and _inside(e, around)]
    operators = outermost(filter(is_wanted, here))
    total: defaultdict[OpKey, float] = defaultdict(float)
    calls: Counter[OpKey] = Counter()
    each: defaultdict[int, float] = defaultdict(float)
    kernels: defaultdict[OpKey, list[str]] = defaultdict(list)
    launches: list[Launch] = []
    tail_us = replayed_us = copied_us = 0.0
    if on_gpu:
        launched = {e.correlation_id(): e for e in host if e.name().startswith(("cu", "hip"))}
        early = {number for number, e in launched.items() if e.start_ns() < asking[0]}
        device = [
            e for e in events
            if e.device_type() == torch._C._autograd.DeviceType.CUDA and _is_work(e) and e.correlation_id() not in early
        ]  # fmt: skip
        owner, around_launch = {e.correlation_id(): e for e in operators}, _Around(operators)
        for op in operators:
            calls[_key(op)] += 1
        work_of: list[tuple[int, float, OpKey | None]] = []
        for kernel in device:
            launch = launched.get(kernel.correlation_id())
            op = owner.get(kernel.linked_correlation_id()) or around_launch(launch)
            if launch is not None:
                replayed_us += kernel.duration_ns() / 1e3 if "GraphLaunch" in launch.name() else 0.0
                work_of.append((launch.start_ns(), kernel.duration_ns() / 1e3, None if op is None else _key(op)))
            if op is not None:
                total[_key(op)] += kernel.duration_ns() / 1e3
                each[id(op)] += kernel.duration_ns() / 1e3
                if len(kernels[_key(op)]) < 8:
                    kernels[_key(op)].append(kernel.name())
        moved = [e for e in device if e.name().startswith(BETWEEN)]
        work = [e for e in device if not e.name().startswith(BETWEEN)]
        copies = [_span(e) for e in moved]
        waits = _waits(host)
        gaps = _device_gaps(work, copies, launched, waits, window, lines, asking_lines)
        launches, tail_us = _launched(work_of, waits, asking)
        spans = union(_span(e) for e in work)
        busy, count = length(spans), len(work)
        # a GPU runs copies of both directions at once
        work_near = Near(spans)
        copied_us = sum(length([copy]) - work_near.within(copy) for copy in union(copies)) / 1e3
    else:
        for op in operators:
            calls[_key(op)] += 1
            total[_key(op)] += op.duration_ns() / 1e3
            each[id(op)] += op.duration_ns() / 1e3
        spans = union(_span(e) for e in here)
        exchanges = Near(union(_span(e) for e in host if e.name().startswith(EXCHANGES)))
        gaps = [_host_gap(gap, exchanges, lines, asking_lines) for gap in complement(spans, window)]
        busy, count = length(spans), len(outermost(here))
    in_order: defaultdict[str, list[float]] = defaultdict(list)
    for op in operators:
        in_order[op.name()].append(each[id(op)])
    return Timeline(
        wall_us=(window[1] - window[0]) / 1e3, busy_us=busy / 1e3, launches=count,
        op_us={key: us / calls[key] for key, us in total.items()}, op_calls=dict(calls),
        calls_us={name: tuple(times) for name, times in in_order.items()},
        kernels={key: tuple(names) for key, names in kernels.items()}, gaps=tuple(gaps), start_ns=window[0],
        launched=tuple(launches), tail_us=tail_us, replayed_us=replayed_us,
        copied_us=copied_us,
        host_work=work_of_the_host(
            lines, [gap[:2] for gap in gaps if gap.cause == "host"], union(_span(e) for e in here), asking_lines
        ),
    )  # fmt: skip


def _is_work(event: Any) -> bool:
    """A kernel, a copy or a fill; the profiler also reports ranges and synchronisations as events of the device.

    A range, such as an optimiser's step, would cover the gaps between its kernels.
    """
    is_range = event.is_user_annotation() or "Synchron" in event.name()
    return bool(event.duration_ns() > 0 and not is_range and event.correlation_id() != 0)


def _inside(event: Any, window: Interval) -> bool:
    return bool(event.start_ns() >= window[0] and event.end_ns() <= window[1])


def _span(event: Any) -> Interval:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def _key(event: Any) -> OpKey:
    return event.name(), tuple(tuple(shape) for shape in event.shapes() if shape)


def outermost(events: Iterable[Any]) -> list[Any]:
    """The events that no other one of their thread contains, in the order of time."""
    found: list[Any] = []
    end: dict[int, int] = {}
    for event in sorted(events, key=lambda e: (e.start_ns(), -e.duration_ns())):
        start, stop = _span(event)
        thread = event.start_thread_id()
        if start >= end.get(thread, 0):
            found.append(event)
            end[thread] = stop
    return found


class _Around:
    """Finds the operator during which a kernel was launched. The operators are sorted, and do not overlap in a thread."""

    def __init__(self, operators: Iterable[Any]) -> None:
        self._operators: defaultdict[Any, list[Any]] = defaultdict(list)
        for op in operators:
            self._operators[op.start_thread_id()].append(op)
        self._starts = {thread: [op.start_ns() for op in its] for thread, its in self._operators.items()}

    def __call__(self, launch: Any) -> Any | None:
        if launch is None or launch.start_thread_id() not in self._starts:
            return None
        thread, at = launch.start_thread_id(), launch.start_ns()
        n = bisect_right(self._starts[thread], at) - 1
        op = self._operators[thread][n]
        return op if n >= 0 and at <= op.start_ns() + op.duration_ns() else None


def _host_gap(gap: Interval, exchanges: Near, lines: Lines, asking: Collection[str]) -> Gap:
    waits = 2 * exchanges.within(gap) > gap[1] - gap[0]
    where = _line_during(gap, lines)
    return Gap(*gap, "exchange" if waits else "host", where, not waits and _is_host_work(gap, where, asking))


def _is_host_work(gap: Interval, where: str, asking: Collection[str]) -> bool:
    # a trace does not say which lines ask
    return bool(asking) and gap[1] - gap[0] > BETWEEN_NS and where != "" and where not in asking


def _line_during(gap: Interval, lines: Lines) -> str:
    """The line that was seen most often during a gap; the samples are sorted by time."""
    first, last = (bisect_left(lines, (edge, HostPlace())) for edge in gap)
    seen = Counter(place.where for _, place in lines[first:last] if place.where)
    return seen.most_common(1)[0][0] if seen else ""


def _waits(host: Sequence[Any]) -> list[Interval]:
    """The times in which the host waits for the device."""
    return [_span(e) for e in host if any(word in e.name() for word in WAITING) and "Async" not in e.name()]


def _launched(
    work: Iterable[tuple[int, float, OpKey | None]], waits: Iterable[Interval], window: Interval
) -> tuple[list[Launch], float]:  # fmt: skip
    """The launches of a step with the host's own time before each, and its time after the last.

    work: of each the time when the host asked, its time on the device in µs, and its operator. window: the host's.
    """
    waited = Near(span for span in waits if window[0] <= span[0] < window[1])
    found: list[Launch] = []
    before = window[0]
    for start, device_us, key in sorted(work, key=lambda one: one[0]):
        between = (before, max(before, start))
        waits_us = waited.within(between) / 1e3
        if found and waits_us:
            found[-1] = found[-1]._replace(waits=True)
        found.append(Launch((between[1] - before) / 1e3 - waits_us, device_us, key))
        before = between[1]
    rest_us = waited.within((before, max(before, window[1]))) / 1e3
    if found and rest_us:
        found[-1] = found[-1]._replace(waits=True)
    return found, max(0, window[1] - before) / 1e3 - rest_us


def _device_gaps(
    work: Sequence[Any], copies: Sequence[Interval], launched: dict[int, Any], waits: Sequence[Interval], window: Interval,
    lines: Lines, asking: Collection[str],
) -> list[Gap]:  # fmt: skip
    spans, copied, waited = union(_span(e) for e in work), Near(copies), Near(waits)
    starts = {e.start_ns(): launched.get(e.correlation_id()) for e in work}
    found = []
    for gap in complement(spans, window):
        launch = starts.get(gap[1])
        if 2 * copied.within(gap) > gap[1] - gap[0]:
            cause = "copy"
        elif launch is not None and launch.start_ns() <= gap[0]:
            cause = "dependency"
        elif 2 * waited.within(gap) > gap[1] - gap[0] or waited.cover(gap[0]):
            cause = "sync"
        else:
            cause = "host"
        where = _line_during(gap, lines) if cause in ("host", "sync") else ""
        found.append(Gap(*gap, cause, where, cause == "host" and _is_host_work(gap, where, asking)))
    return found
