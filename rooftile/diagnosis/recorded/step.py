"""The step of a trace that is diagnosed: one ProfilerStep, or the whole trace where its program called no `prof.step()`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rooftile.diagnosis.recorded.event import TraceEvent
from rooftile.diagnosis.recorded.file import RecordedTrace
from rooftile.diagnosis.watching.compiled import NAMESPACE
from rooftile.diagnosis.watching.intervals import Interval, complement, union
from rooftile.errors import InvalidInput

# the range of a compiled graph's run, and the name of what it computes itself
COMPILED_GRAPH, BETWEEN = "## Call CompiledFxGraph", f"{NAMESPACE}::compiled_graph"
PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of a trace."""

    name: str  # "ProfilerStep#3", or "the whole trace"
    window: Interval  # on a GPU in the time of the device: from the end of what was asked for before it
    asking: Interval  # the time of the host
    host: Sequence[TraceEvent]  # all that runs in the time of the host, also Python's functions that have begun before it
    device: Sequence[TraceEvent]  # what was asked for in it
    spread_us: float | None  # by how much the trace's steps differ; None for a single one

    @property
    def on_gpu(self) -> bool:
        return bool(self.device)

    @property
    def thread(self) -> object:
        """The thread that calls most of the operators."""
        return Counter(event.thread for event in self.host if event.category == "cpu_op").most_common(1)[0][0]

    @property
    def events(self) -> list[TraceEvent]:
        """The events that a profiler of the step alone would have had."""
        own = ("cpu_op", "cuda_runtime", "cuda_driver")
        begun = (e for e in self.host if e.start_ns() >= self.asking[0])
        called = [e for e in begun if e.category in own or e.name().startswith(f"{NAMESPACE}::")]
        return [*called, *self.device] if self.on_gpu else [*called, *self._compiled(called)]

    def _compiled(self, called: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
        """Yields what a graph that was compiled for a CPU computes between its operators: its kernels leave no events."""
        for graph in self.host:
            if graph.name().startswith(COMPILED_GRAPH):
                its = [e for e in called if e.thread == graph.thread and graph.start_ns() <= e.start_ns() < graph.end_ns()]
                spans = union((e.start_ns(), e.end_ns()) for e in its if "::" in e.name())
                for start, end in complement(spans, (graph.start_ns(), graph.end_ns())):
                    yield graph.part(BETWEEN, start, end)


def step_of(trace: RecordedTrace, number: int | None = None) -> RecordedStep:
    """Returns one step of a trace.

    number: of its ProfilerStep; None takes the one of median length, or the whole trace if it has no ProfilerStep.

    Raises InvalidInput if there is no such step, or if it uses several GPUs or has no operator.
    """
    name, asking, spread_us = _chosen(trace, number)
    if asking[0] == asking[1]:
        raise InvalidInput(f"{trace.name} has no time in {name}: its events are 0 µs long; record it again")
    host = [event for event in trace.events if not event.on_device]
    own, before = _asked_for(host, [event for event in trace.events if event.on_device], asking)
    of_host = [event for event in host if asking[0] < event.end_ns() and event.start_ns() < asking[1]]
    if not any(event.category == "cpu_op" for event in of_host):
        raise InvalidInput(f"{trace.name} has no operator in {name}; record it with ProfilerActivity.CPU")
    gpus = sorted({event.args["device"] for event in own if isinstance(event.args.get("device"), int)})
    if len(gpus) > 1:
        raise InvalidInput(f"{name} uses {len(gpus)} GPUs ({', '.join(map(str, gpus))}); record a process for each")
    return RecordedStep(
        name=name, window=_window(asking, own, before), asking=asking, host=of_host, device=own, spread_us=spread_us
    )  # fmt: skip


def _chosen(trace: RecordedTrace, number: int | None) -> tuple[str, Interval, float | None]:
    """Returns the name of a step, its time on the host, and by how much the trace's steps differ."""
    marks = _marks(trace)
    if number is not None and number not in marks:
        none = "its program called no prof.step(), so leave the step out"
        raise InvalidInput(f"{trace.name} has no ProfilerStep#{number}; {f'it has {_numbers(sorted(marks))}' if marks else none}")
    if not marks:
        called = [event for event in trace.events if not event.on_device and event.category != "python_function"]
        return "the whole trace", (min(e.start_ns() for e in called), max(e.end_ns() for e in called)), None
    if number is None:
        number = sorted(marks, key=lambda n: marks[n].duration_ns())[(len(marks) - 1) // 2]
    lengths = [mark.duration_ns() / 1e3 for mark in marks.values()]
    spread_us = 1.25 * (max(lengths) - min(lengths)) / len(lengths) if len(lengths) > 1 else None
    return f"ProfilerStep#{number}", (marks[number].start_ns(), marks[number].end_ns()), spread_us


def _marks(trace: RecordedTrace) -> dict[int, TraceEvent]:
    """Returns the events that begin and end the steps, by number."""
    found: dict[int, TraceEvent] = {}
    for event in trace.events:
        marked = PROFILER_STEP.fullmatch(event.name()) if not event.on_device else None
        # a trace that was put together of several has some twice
        if marked and (int(marked[1]) not in found or event.duration_ns() > found[int(marked[1])].duration_ns()):
            found[int(marked[1])] = event
    return found


def _numbers(given: Sequence[int]) -> str:
    is_range = len(given) > 2 and given[-1] - given[0] == len(given) - 1
    return f"{given[0]} to {given[-1]}" if is_range else ", ".join(map(str, given))


def _asked_for(
    host: Sequence[TraceEvent], device: Sequence[TraceEvent], asking: Interval
) -> tuple[list[TraceEvent], list[TraceEvent]]:
    """Returns what the host asked the device for in its time, and what it had asked for before."""
    asked = {e.correlation_id(): e.start_ns() for e in host if e.category in ("cuda_runtime", "cuda_driver")}
    own, before = [], []
    for event in device:
        at = asked.get(event.correlation_id(), event.start_ns())
        if asking[0] <= at < asking[1]:
            own.append(event)
        elif at < asking[0]:
            before.append(event)
    return own, before


def _window(asking: Interval, own: Sequence[TraceEvent], before: Sequence[TraceEvent]) -> Interval:
    """Returns the time of a step on its device, which may be late: it begins when all that came before has ended."""
    if not own:
        return asking
    end = max(asking[1], *(event.end_ns() for event in own))
    begin = max([asking[0], *(event.end_ns() for event in before)])
    return (begin, end) if begin < end else (asking[0], end)
