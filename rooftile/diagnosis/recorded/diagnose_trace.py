"""Diagnoses a recorded step: its operators, gaps and bounds by model, without a run of the program."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rooftile.diagnosis.diagnosis import Diagnosis, diagnosis
from rooftile.diagnosis.machine import roofs_of
from rooftile.diagnosis.missing import missing
from rooftile.diagnosis.output.json_rows import Program
from rooftile.diagnosis.recorded.calls import Calls, one_floating_dtype
from rooftile.diagnosis.recorded.file import RecordedTrace, read_trace
from rooftile.diagnosis.recorded.machine import TraceMachine, in_tf32, machine_of
from rooftile.diagnosis.recorded.operators import is_operator, rows_of
from rooftile.diagnosis.recorded.places import Places
from rooftile.diagnosis.recorded.step import BETWEEN, RecordedStep, step_of
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.remedies.observed_step import ObservedStep
from rooftile.diagnosis.remedies.propose import propose_by_times
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.diagnosis.verdicts.above import why_above
from rooftile.diagnosis.verdicts.classify import COLLECTIVES
from rooftile.diagnosis.verdicts.findings import Finding, find
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.diagnosis.watching.compiled import NAMESPACE
from rooftile.diagnosis.watching.idle import IdleTime
from rooftile.diagnosis.watching.in_order import call_times_us
from rooftile.diagnosis.watching.timeline import Timeline, outermost, timeline_of
from rooftile.errors import InvalidInput
from rooftile.runtime.words import answers_foreign_words

NO_EXPERIMENT = "a trace allows no experiment"
# ... and the host is slower under a profiler, which a GPU's step shows as overhead
SLOWER_HOST = f"{NO_EXPERIMENT}, and its profiler slows the host, so the overhead is an upper limit"


@answers_foreign_words
def from_trace(path: str | Path, *, step: int | None = None, device_name: str | None = None) -> Diagnosis:
    """Finds what bounds a step that torch.profiler has recorded, by counts and models: a trace allows no experiment.

    FLOPs and bytes need a profile with record_shapes=True; modules and lines need with_stack=True and with_modules=True.

    Args:
        path: the Chrome trace, of `prof.export_chrome_trace` or `tensorboard_trace_handler`, packed by gzip or not.
        step: the number of a ProfilerStep; None takes the one of median length, or the whole trace where the program called no
            `prof.step()`.
        device_name: the GPU whose datasheet is taken, such as "H100". None takes this machine's measured ceilings if it is the
            trace's, else the datasheet of the GPU that the trace names.

    Returns:
        A `Diagnosis` whose verdicts are all "modelled".

    Raises:
        InvalidInput: the file is no trace of torch.profiler, is cut off, or has no operator; there is no such step or datasheet.

    Example:
        >>> print(rooftile.diagnosis.from_trace("trace.json.gz", step=3))   # doctest: +SKIP
    """
    if step is not None and (isinstance(step, bool) or not isinstance(step, int)):
        raise InvalidInput(f"step is {step!r}; must be the number of a ProfilerStep, such as 3")
    with _no_collection():
        return _diagnosed(read_trace(path), step, device_name)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Looks for no cycles of objects meanwhile: a trace is without cycles, and the look takes as long as all the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _diagnosed(trace: RecordedTrace, step: int | None, device_name: str | None) -> Diagnosis:
    seen = step_of(trace, step)
    machine = machine_of(trace, seen, device_name)
    timeline, operations = _operations(seen)
    times_us = call_times_us(operations, timeline)
    findings = [_finding(operation, times_us[operation.key], timeline, machine) for operation in operations]
    idle = IdleTime(timeline, timeline.wall_us)
    evidence = StepEvidence(
        time_us=timeline.wall_us, spread_us=seen.spread_us or 0.0, idle_us=idle.by_cause, waiting_us=idle.waiting_us,
        why_not={"experiments": SLOWER_HOST if seen.on_gpu else NO_EXPERIMENT},
    )  # fmt: skip
    kernels = {row: names for row, f in enumerate(findings) if (names := _kernels(timeline, f.operation))}
    found = diagnosis(
        machine=machine.values, ceilings=machine.known(), program=_program(trace, seen, operations, timeline), step=evidence,
        findings=findings, remedies=_remedies(machine, evidence, findings, timeline, idle, kernels),
        launches=timeline.launches, busy_us=timeline.busy_us, kernels=kernels,
        notes=[*_notes(trace, seen, machine, operations), *idle.notes(), *_missing(seen, timeline, findings)]
        + (why_above(findings, machine.ceilings) if machine.is_here else []),
    )  # fmt: skip
    without = {f.operation.op for f in findings if len(f.operation.key) == 4}
    return replace(
        found, step=replace(found.step, confidence="modelled"), uncounted=tuple(op for op in found.uncounted if op not in without)
    )  # fmt: skip


def _operations(step: RecordedStep) -> tuple[Timeline, list[OperatorRow]]:
    events, places = step.events, Places(step.host)
    lines = places.samples(step.thread, step.window)
    timeline = timeline_of(events, step.window, step.asking, lines, step.on_gpu, is_operator)
    operators = outermost(event for event in events if is_operator(event) and event.end_ns() <= step.window[1])
    with_kernels = timeline.op_us.keys() if step.on_gpu else None
    calls = Calls(one_floating_dtype(operators))
    return timeline, rows_of(operators, places.of(operators), calls, with_kernels)


def _finding(operation: OperatorRow, call_us: float, timeline: Timeline, machine: TraceMachine) -> Finding:
    """Returns the finding of an operator; its verdict is the model's, and says why there is no more."""
    tf32 = in_tf32(_kernels(timeline, operation))
    roofs = roofs_of(operation, machine.device, machine.ceilings, in_tf32=tf32)
    found = find(operation, roofs, None, call_us * operation.calls or None)
    reason = NO_EXPERIMENT
    if len(operation.key) == 4 and operation.op != BETWEEN:
        reason += ", and this one has no shapes: record it with record_shapes=True"
    elif operation.flops is None or operation.bytes is None:
        reason += ", and neither a rule nor the trace gives its counts"
    elif operation.op.startswith(COLLECTIVES):
        reason = f"it is a collective; {reason}"
    return replace(found, verdict=replace(found.verdict, confidence="modelled", confirmed_by=reason))


def _kernels(timeline: Timeline, operation: OperatorRow) -> Sequence[str]:
    return timeline.kernels_of(operation.op, operation.shapes)


def _program(
    trace: RecordedTrace, step: RecordedStep, operations: Sequence[OperatorRow], timeline: Timeline
) -> Program:  # fmt: skip
    if timeline.replayed_us > timeline.busy_us / 2:
        mode = "graph"
    else:
        is_compiled = any(operation.op.startswith(NAMESPACE) for operation in operations)
        mode = "compiled" if is_compiled else "eager"
    name = f"{step.name} of {trace.rank}" if trace.rank else step.name
    return Program(command=trace.name, step=f"{name}, recorded ({NO_EXPERIMENT}),", torch="unknown", mode=mode)


def _remedies(
    machine: TraceMachine, evidence: StepEvidence, findings: Sequence[Finding], timeline: Timeline, idle: IdleTime,
    kernels: Mapping[int, Sequence[str]],
) -> list[Remedy]:  # fmt: skip
    # the cores of another machine are unknown, and workers of a loader need some
    waits = idle.waits if machine.is_here else {place._replace(loads=""): us for place, us in idle.waits.items()}
    seen = ObservedStep(
        device=machine.device, ceilings=machine.ceilings, step=evidence, findings=findings, calls=(), kept=frozenset(),
        busy_us=timeline.busy_us, launches=timeline.launches, kernels=kernels, sync_us=idle.lines("sync"), waits=waits,
    )  # fmt: skip
    return propose_by_times(seen, int(machine.values.get("cores", 0)) if machine.device.type == "cuda" else 0)


def _notes(
    trace: RecordedTrace, step: RecordedStep, machine: TraceMachine, operations: Sequence[OperatorRow]
) -> list[str]:  # fmt: skip
    found = [
        f"{trace.name} is a recorded trace, which allows no experiment: every bound is the model's, from counts and ceilings",
        machine.note,
        "times are as under the profiler, which lengthens the host's part of each operator, with shapes and stacks by tens of "
        "microseconds" + (": the share of overhead, and what a CUDA graph would save, are upper limits" if step.on_gpu else ""),
        "compile, fused operators, narrower dtypes and checkpoints have no price: a trace does not say which operators share a "
        "tensor, and runs nothing",
    ]
    without = [operation for operation in operations if len(operation.key) == 4 and operation.op != BETWEEN]
    if without:
        count = sum(operation.calls for operation in without)
        found.append(f"{count:,} calls have no shapes, and no counts: record with record_shapes=True")
    if any(operation.op == BETWEEN for operation in operations):
        found.append(
            "a CPU's compiled kernels leave no events: compiled_graph is all that a graph computes between its operators"
        )
    return found


def _missing(step: RecordedStep, timeline: Timeline, findings: Sequence[Finding]) -> list[str]:
    return missing(
        step_us=timeline.wall_us, profiled_us=timeline.wall_us,
        operators_us=sum(f.time_us for f in findings) - timeline.copied_us, idle_us=sum(timeline.idle_us.values()),
        replayed_us=timeline.replayed_us, on_gpu=step.on_gpu,
    )  # fmt: skip
