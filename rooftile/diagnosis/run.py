"""Diagnoses one step: watches it, times it, experiments on its leading operators, and joins what was found."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rooftile.diagnosis import machine
from rooftile.diagnosis.diagnosis import Diagnosis, diagnosis
from rooftile.diagnosis.experiments.measure import Limits, evidence
from rooftile.diagnosis.output.rows import Program
from rooftile.diagnosis.records import Operation
from rooftile.diagnosis.remedies import prices
from rooftile.diagnosis.remedies.remedy import Remedy
from rooftile.diagnosis.steps import Role, Steps, Timed
from rooftile.diagnosis.timeline import Profiled, Timeline
from rooftile.diagnosis.unchanged import state_of, unchanged
from rooftile.diagnosis.verdicts.findings import Finding, find
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.diagnosis.watch import Record, Watch
from rooftile.errors import InvalidInput
from rooftile.hardware.device import describe

WARM_UPS, TIMED_STEPS = 3, 7
# operators are taken by their share of the time until so much of it is explained
EXPLAINED = 0.9
MOST_OPERATIONS = 20
# bytes of copies of inputs
SAMPLES_LIMIT = 2 << 30


def diagnose(
    function: Callable[..., Any] | nn.Module, *inputs: Any, backward: bool = False, budget: float = 60.0
) -> Diagnosis:
    """Finds what bounds a function or module: memory, compute, overhead, the host; operator by operator and as a whole.

    The function is called some twenty times, and its leading operators some hundred times each on copies of their inputs. After
    it parameters, gradients, buffers, optimisers and the streams of random numbers are as before.

    Args:
        function: one step of a program: a module, or a function that may train one.
        inputs: its arguments.
        backward: also run the backward, of the sum of all outputs that require a gradient.
        budget: seconds that the experiments may take, beyond the steps themselves.

    Returns:
        A `Diagnosis`: `print` it for the table, `to_json()` for a file.

    Raises:
        InvalidInput: the function is no callable, or the budget is not positive.

    Example:
        >>> model, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
        >>> print(rooftile.diagnose(model, x, backward=True))

    The method is Horace He's (Making Deep Learning Go Brrrr From First Principles): raise the arithmetic, or take away the
    traffic, and watch the time.
    """
    if not callable(function):
        raise InvalidInput(f"diagnose takes a function or a module; got {type(function).__name__}")
    if not budget > 0:
        raise InvalidInput(f"budget is {budget}; must be a positive number of seconds")
    name = getattr(function, "__qualname__", type(function).__name__)

    def step() -> None:
        result = function(*inputs)
        if backward:
            _backward(result)

    found: list[Diagnosis] = []
    def resized(factor: float) -> Callable[[], None] | None:
        scaled = _with_batch(inputs, factor)
        if scaled is None:
            return None

        def other() -> None:
            result = function(*scaled)
            if backward:
                _backward(result)

        return other

    observer = Observer(name, _device_of(function, inputs), budget, resized)
    steps = Steps(observer.roles, lambda: found.append(observer.conclude()))
    with unchanged(state_of(function, inputs)):
        for _ in range(steps.needed):
            steps.begin()
            try:
                step()
            except BaseException as error:
                steps.abandon(error)
                raise
            steps.end()
    return found[0]


class Observer:
    """Decides what is done at each step of a program, and concludes from it.

    Args:
        name: of the step, for the reader.
        device: where it runs.
        budget: seconds for the experiments.
        resized: gives the step with the batch times a factor; None where no axis of the inputs is one. Without it the batch
            stays.
    """

    def __init__(
        self, name: str, device: torch.device, budget: float,
        resized: Callable[[float], Callable[[], None] | None] | None = None,
    ) -> None:  # fmt: skip
        self._name, self._device, self._budget, self._resized = name, device, budget, resized
        self._taken: list[float] = []
        self._watch = Watch()
        self._profiled = Profiled(device, lambda: {operation.op for operation in self._watch.operations})
        self._record: Record | None = None

    @property
    def roles(self) -> list[Role]:
        """One for each step: warm-up, times, a watched, a profiled and a recorded step."""
        timed: Role = lambda: Timed(self._device, self._taken)  # noqa: E731
        return [nullcontext] * WARM_UPS + [timed] * TIMED_STEPS + [lambda: self._watch, lambda: self._profiled, self._recording]

    def _recording(self) -> Record:
        self._record = Record(self._leading(), SAMPLES_LIMIT)
        return self._record

    @property
    def _timeline(self) -> Timeline:
        return self._profiled.timeline

    def _us(self, operation: Operation) -> float:
        """The time of all calls of an operation in the profiled step."""
        shapes = tuple(kind[0] for kind in operation.key[4:] if isinstance(kind, tuple) and kind[0])
        us = self._timeline.op_us.get((operation.op, shapes))
        if us is None:
            same = [(key, us) for key, us in self._timeline.op_us.items() if key[0] == operation.op]
            calls = sum(self._timeline.op_calls[key] for key, _ in same)
            us = sum(us * self._timeline.op_calls[key] for key, us in same) / calls if calls else 0.0
        return us * operation.calls * self._shrink

    @property
    def _shrink(self) -> float:
        """The time of a step over that of the profiled one, in which every operator takes a little longer."""
        return min(1.0, median(self._taken) / self._timeline.wall_us)

    def _leading(self) -> list[Operation]:
        """The operations that explain most of the time, longest first."""
        ranked = sorted(self._watch.operations, key=self._us, reverse=True)
        total, so_far, chosen = sum(map(self._us, ranked)), 0.0, []
        for operation in ranked[:MOST_OPERATIONS]:
            chosen.append(operation)
            so_far += self._us(operation)
            if so_far >= EXPLAINED * total:
                break
        return chosen

    def conclude(self) -> Diagnosis:
        """Makes the experiments and joins everything."""
        measured = machine.measure(self._device)
        samples = self._record.samples if self._record else {}
        each = self._budget / max(len(samples), 1)
        end = time.perf_counter() + self._budget
        findings: list[Finding] = []
        notes: list[str] = []
        # the most expensive first, as the budget may end
        for operation in sorted(self._watch.operations, key=self._us, reverse=True):
            roofs = machine.roofs_of(operation, self._device, measured)
            sample = samples.pop(operation.key, None)
            found = None
            if sample is not None and time.perf_counter() < end:
                limits = Limits(seconds=min(each, 2.0), flops_per_s=roofs.flops_per_s)
                try:
                    found = evidence(sample, self._device, limits, self._us(operation) / operation.calls)
                except (RuntimeError, NotImplementedError) as error:
                    notes.append(f"{operation.op} could not be run again: {str(error).splitlines()[0]}")
            findings.append(find(operation, roofs, found, self._us(operation) or None))
        step = self._evidence()
        return diagnosis(
            machine=describe(self._device).json(), ceilings=machine.of_json(self._device, measured),
            program=Program(command=shlex.join(sys.argv), step=self._name, torch=torch.__version__, mode="eager"),
            step=step, findings=findings, remedies=self._remedies(step, findings), launches=self._timeline.launches,
            busy_us=self._timeline.busy_us * self._shrink, kernels=self._kernels(findings), notes=[*self._notes(), *notes],
        )  # fmt: skip

    def _evidence(self) -> StepEvidence:
        timeline, us = self._timeline, median(self._taken)
        shrink = self._shrink
        idle = {cause: time_us * shrink for cause, time_us in timeline.idle_us.items()}
        # many short gaps of one line are a loop of Python, which is overhead; a long one waits for something
        single = [gap.us * shrink for gap in timeline.gaps if gap.cause == "host" and gap.us > max(1e3, 0.05 * timeline.wall_us)]
        spread = 1.25 * (max(self._taken) - min(self._taken)) / len(self._taken)
        why_not = {"graph": "needs a GPU" if self._device.type == "cpu" else "not tried"}
        half, double = (self._resized_us(factor, why_not) for factor in (0.5, 2.0))
        return StepEvidence(
            time_us=us, spread_us=spread, half_batch_us=half, double_batch_us=double, idle_us=idle,
            waiting_us=min(sum(single), idle.get("host", 0.0)),
            why_not=why_not,
        )  # fmt: skip

    def _resized_us(self, factor: float, why_not: dict[str, str]) -> float | None:
        """The time of the step with another batch; None if it cannot be run, with the reason."""
        step = self._resized(factor) if self._resized is not None else None
        if step is None:
            why_not["batch"] = "the inputs have no first axis in common" if self._resized else "the step takes no inputs"
            return None
        taken: list[float] = []
        try:
            for _ in range(WARM_UPS):
                step()
            for _ in range(TIMED_STEPS):
                with Timed(self._device, taken):
                    step()
        except (RuntimeError, ValueError, IndexError) as error:
            why_not["batch"] = str(error).splitlines()[0]
            return None
        return median(taken)

    def _remedies(self, step: StepEvidence, findings: Sequence[Finding]) -> list[Remedy | None]:
        found: list[Remedy | None] = [prices.larger_batch(step)]
        if self._device.type == "cuda":
            found.append(prices.cuda_graph(step, busy_us=self._timeline.busy_us, launches=self._timeline.launches, node_us=1.5))
            rows = [(n, f) for n, f in enumerate(findings) if f.operation.dtype == "fp32"]
            found.append(prices.narrower_dtype(rows, "bf16", rate_ratio=8.0, bytes_ratio=0.5) if rows else None)
        found += [prices.remove_synchronisation(where, us) for where, us in self._sync_lines().items()]
        return found

    def _sync_lines(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for gap in self._timeline.gaps:
            if gap.cause == "sync" and gap.where:
                found[gap.where] = found.get(gap.where, 0.0) + gap.us
        return found

    def _kernels(self, findings: Sequence[Finding]) -> dict[int, Sequence[str]]:
        by_op = {key[0]: names for key, names in self._timeline.kernels.items()}
        return {n: by_op[f.operation.op] for n, f in enumerate(findings) if f.operation.op in by_op}

    def _notes(self) -> list[str]:
        wall = self._timeline.wall_us
        return [
            f"{where}: {us / 1e3:.3g} ms of the step, in which nothing ran"
            for where, us in self._timeline.lines.items()
            if us > 0.05 * wall
        ]


def _backward(result: Any) -> None:
    outputs = [x for x in _tensors(result) if x.requires_grad]
    if not outputs:
        raise InvalidInput("backward=True, and no output requires a gradient; diagnose without it")
    torch.autograd.backward([x.float().sum() if x.is_floating_point() else x for x in outputs])


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = result.values()
    elif hasattr(result, "to_tuple"):
        result = result.to_tuple()
    elif not isinstance(result, list | tuple):
        return []
    return [x for one in result for x in _tensors(one)]


def _with_batch(inputs: Sequence[Any], factor: float) -> tuple[Any, ...] | None:
    """The inputs with the first axis of all tensors times `factor`; None if they have none in common, or nothing to halve."""
    sizes = {x.shape[0] if x.ndim else 0 for x in inputs if isinstance(x, Tensor)}
    if len(sizes) != 1 or (size := sizes.pop()) == 0 or (factor < 1 and size < 2):
        return None
    return tuple(
        x if not isinstance(x, Tensor) else x[: int(size * factor)] if factor < 1 else torch.cat([x] * round(factor))
        for x in inputs
    )


def _device_of(function: Any, inputs: Sequence[Any]) -> torch.device:
    """Returns the device of the step's tensors: a GPU if any is on one."""
    found = []
    for thing in state_of(function, inputs):
        if isinstance(thing, Tensor):
            found.append(thing.device)
        elif isinstance(thing, nn.Module):
            found += [p.device for p in thing.parameters()]
    on_gpu = {device for device in found if device.type == "cuda"}
    if len(on_gpu) > 1:
        raise InvalidInput(f"the step uses {len(on_gpu)} GPUs ({', '.join(sorted(map(str, on_gpu)))}); diagnose one at a time")
    return on_gpu.pop() if on_gpu else torch.device("cpu")
