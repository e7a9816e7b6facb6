"""Observes the steps of a program, each in its own way, and concludes from them."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rooftile.diagnosis import machine
from rooftile.diagnosis.counts import counters
from rooftile.diagnosis.diagnosis import Diagnosis, diagnosis
from rooftile.diagnosis.experiments import deadline
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.evidence import Evidence
from rooftile.diagnosis.experiments.series import Recorded, measure_all, prepare_scales
from rooftile.diagnosis.experiments.step import batch_shares, needed_steps, replayed_share
from rooftile.diagnosis.missing import missing
from rooftile.diagnosis.output.json_rows import Program
from rooftile.diagnosis.output.trace import Trace
from rooftile.diagnosis.records import OperatorRow, Sample
from rooftile.diagnosis.remedies.alone import aligned_saving_us, can_be_padded, cast_us, padded_saving_us
from rooftile.diagnosis.remedies.apply import expected_s
from rooftile.diagnosis.remedies.attentions import StepAttention, find_attentions, time_ours
from rooftile.diagnosis.remedies.bf16.in_bf16 import shares_in_bf16
from rooftile.diagnosis.remedies.bf16.narrower import bf16_may_gain, why_no_price
from rooftile.diagnosis.remedies.observed_step import WORTH, ObservedStep
from rooftile.diagnosis.remedies.prices import NOT_TRIED, WITH_OTHERS
from rooftile.diagnosis.remedies.propose import PRODUCTS, propose, why_not_compiled
from rooftile.diagnosis.remedies.queue import Queue
from rooftile.diagnosis.remedies.remedy import DTYPE, PAD
from rooftile.diagnosis.remedies.wider import shares_in_fp32, slow_dtypes
from rooftile.diagnosis.verdicts.above import is_above, why_above
from rooftile.diagnosis.verdicts.classify import COLLECTIVES, classify, settled
from rooftile.diagnosis.verdicts.findings import Finding, find
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.diagnosis.watching.chosen_step import ChosenStep
from rooftile.diagnosis.watching.compiled import NAMESPACE
from rooftile.diagnosis.watching.in_order import call_times_us
from rooftile.diagnosis.watching.processes import are_several
from rooftile.diagnosis.watching.steps import Lead, Role, StepTimer
from rooftile.diagnosis.watching.timeline import Profiled
from rooftile.diagnosis.watching.watch import Devices, Record, Watch
from rooftile.errors import Unsupported
from rooftile.hardware import ceilings
from rooftile.hardware.ceilings import Ceilings
from rooftile.hardware.device import describe

PROFILED_STEPS = 3
# timed steps at least, and one profiled; more only as long as all timed steps take no more than a quarter of the budget
LEAST_TIMED_STEPS, IN_TIMES = 3, 0.25
# steps of the program beside the timed ones: what they take beyond the budget the experiments have less, so that the page is
# there after twice the budget
OTHER_STEPS = 5 + PROFILED_STEPS
# the share of the budget for a step that is warmed up twice only
SLOW = 0.05
# steps that take no longer are longer by a part of it when the caches are cold
SHORT_US = 100e3
Kind = tuple[object, ...]  # as in `Operation.kind`

# operators are taken by their share of the time until so much of it is explained; some of them allow no experiment
EXPLAINED = 0.95
MOST_KINDS = 100
# bytes of copies of inputs on a CPU; on a GPU half of the memory that is free, where an optimiser's lists are large
SAMPLES_LIMIT = 2 << 30
NO_INPUTS = "the program makes its own inputs; name the function of one step by --step to have other batches tried"
# the share of the budget for runs in bf16: a price that rests on runs is worth more than a last verdict
IN_BF16 = 0.25
# the most of the budget that is kept for the experiments on the whole step, and for trying compiled code
IN_STEPS, IN_COMPILING = 0.25, 0.33
# ... and for compiling other attentions on a GPU
IN_ATTENTIONS = 0.15
# an attention is worth timing another one if it takes so much of the step
ATTENTION_SHARE = 0.02

# devices whose ceilings this process has measured a second time
_measured_again: set[torch.device] = set()


class Observer:
    """Decides what is done at each step of a program, and concludes from it.

    Args:
        name: of the step, for the reader.
        budget: seconds for the experiments.
        resized: gives the step with the batch times a factor (1: as it is); None where inputs have no axis of a batch. Without it
            only the program runs the step.
        pads: also times products with padded sizes.
        ncu: also counts bytes by Nsight Compute.
        compiles: the caller may try compiled code when the diagnosis is there, so time is kept for it.
        say: is called with words about what is measured once on a machine, and costs no budget.
    """

    def __init__(
        self, name: str, budget: float,
        resized: Callable[[float], Callable[[], None] | None] | None = None, pads: bool = False,
        ncu: bool = False, compiles: bool = False, say: Callable[[str], None] = lambda words: None,
    ) -> None:  # fmt: skip
        self._name, self._budget, self._resized, self._pads = name, budget, resized, pads
        self._ncu, self._compiles = ncu, compiles
        self._say: Callable[[str], None] = lambda words: say(f"{words}, for this machine: it costs no budget")
        self.deadline = Deadline(budget)
        self._taken: list[float] = []
        self._launched: list[float] = []
        self._watch = Watch()
        self._devices = Devices()
        self._second = 0.0  # when the second step began
        self._profiles: list[tuple[int, Profiled]] = []  # each with the number of timed steps before it
        self._record: Record | None = None
        self._peak_bytes: int | None = None

    @property
    def roles(self) -> list[Role]:
        """One for each step: warm-up, times, a watched, a profiled and a recorded step."""
        # the first step may compile, which nothing may watch
        warm_ups: list[Role] = [self._beginning, self._finding_devices, self._third]
        # once a GPU was profiled, its driver takes longer for each launch
        on_gpu: list[Role] = [self._lead, self._timing_on_gpu] * (2 * PROFILED_STEPS + 1)
        # a profiled step between two timed ones meets the same machine: others may keep it busy for a while, or steps grow
        turn: list[Role] = [self._warming, self._timing_on_cpu, self._timing_on_cpu, self._profiling]
        last: list[Role] = [self._warming, self._timing_on_cpu, self._recording]
        return [*warm_ups, self._watching, *on_gpu, *turn * PROFILED_STEPS, *last]

    @property
    def device(self) -> torch.device:
        """The device of the step, known after two steps."""
        return self._devices.main

    # a program may end within a step, and is run again then: each begins with nothing seen

    def _beginning(self) -> AbstractContextManager[None]:
        # a better way to tell steps apart may have been found, after some of another kind
        self._taken, self._launched, self._profiles = [], [], []
        for name in ("_step", "_call_times_us"):
            self.__dict__.pop(name, None)
        return nullcontext()

    def _finding_devices(self) -> Devices:
        self._devices, self._second = Devices(), deadline.clock()
        return self._devices

    @property
    def _is_late(self) -> bool:
        # processes that meet in their steps make as many as each other
        too_long = sum(self._taken) / 1e6 > IN_TIMES * self._budget and not are_several()
        return len(self._taken) >= LEAST_TIMED_STEPS and too_long

    def _lead(self) -> Lead | None:
        return None if self._is_late or self.device.type != "cuda" else Lead(self.device, self._launched)

    def _timing_on_gpu(self) -> StepTimer | None:
        return None if self._is_late or self.device.type != "cuda" else StepTimer(self.device, self._taken, led=True)

    def _warming(self) -> AbstractContextManager[None] | None:
        """Runs a short step after a watched or a profiled one, which leaves nothing of the program in a CPU's caches."""
        is_long = bool(self._taken) and self._taken[-1] > SHORT_US and not are_several()
        return None if self._is_late or is_long or self.device.type == "cuda" else nullcontext()

    def _timing_on_cpu(self) -> StepTimer | None:
        return None if self._is_late or self.device.type == "cuda" else StepTimer(self.device, self._taken)

    def _watching(self) -> Watch:
        self._watch = Watch()
        return self._watch

    def _profiling(self) -> Profiled | None:
        if self._profiles and self._is_late:
            return None
        made = Profiled(
            self.device, lambda: {operation.op for operation in self._watch.operations},
            lambda: {operation.where for operation in self._watch.operations},
        )  # fmt: skip
        self._profiles.append((len(self._taken), made))
        return made

    def _third(self) -> AbstractContextManager[None] | None:
        """Warms up once more, but not where that takes long and nothing is measured meanwhile."""
        is_slow = deadline.clock() - self._second > SLOW * self._budget
        return None if is_slow and self.device.type == "cpu" and not are_several() else self._peak()

    @contextmanager
    def _peak(self) -> Iterator[None]:
        """Measures the memory that a step takes on a GPU."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        yield
        if self.device.type == "cuda":
            self._peak_bytes = torch.cuda.max_memory_allocated(self.device)

    def _recording(self) -> Record:
        limit = SAMPLES_LIMIT
        if self.device.type == "cuda":
            limit = torch.cuda.mem_get_info(self.device)[0] // 2
        self._record = Record(self._leading(), limit)
        return self._record

    @cached_property
    def _step(self) -> ChosenStep:
        return ChosenStep(self._taken, self._profiles)

    def _us(self, operation: OperatorRow) -> float:
        """The time of all calls of an operation in the profiled step."""
        return self._call_times_us[operation.key] * operation.calls * self._step.shrink

    @cached_property
    def _call_times_us(self) -> Mapping[tuple[object, ...], float]:
        return call_times_us(self._watch.operations, self._step.timeline)

    def _kinds(self) -> dict[Kind, list[int]]:
        """The rows of each kind of operation. The kinds that take the most time are first."""
        rows: dict[Kind, list[int]] = {}
        for row, operation in enumerate(self._watch.operations):
            rows.setdefault(operation.kind, []).append(row)
        return dict(sorted(rows.items(), key=lambda item: -self._kind_us(item[1])))

    def _kind_us(self, rows: Sequence[int]) -> float:
        """The time of all calls of some rows."""
        operations = self._watch.operations
        return sum(self._us(operations[row]) for row in rows)

    def _leading(self) -> list[OperatorRow]:
        """An operation of each of the kinds that explain most of the time, longest first."""
        operations = self._watch.operations
        # a collective alone would wait for the other processes for ever
        alone = [rows for rows in self._kinds().values() if not operations[rows[0]].op.startswith(COLLECTIVES)]
        total, so_far, chosen = sum(map(self._kind_us, alone)), 0.0, []
        for rows in alone[:MOST_KINDS]:
            chosen.append(operations[rows[0]])
            so_far += self._kind_us(rows)
            if so_far >= EXPLAINED * total:
                break
        return chosen

    def conclude(self) -> Diagnosis:
        """Makes the experiments and joins everything."""
        measured = ceilings.measure_when_quieter(self.device, say=self._say)
        samples = self._record.samples if self._record else {}
        operations = self._watch.operations
        prepare_scales(samples.values(), self.device, self._budget, self._say)
        counted: list[dict[str, Any]] = []
        notes: list[str] = []
        if self._ncu and self.device.type == "cuda":
            counted, notes = counters.count([samples[kind] for kind in self._kinds() if kind in samples])
        elif self._ncu:
            notes = ["ncu counts on a GPU only"]
        self.deadline = Deadline(min(self._budget, 2 * self._budget - (len(self._taken) + OTHER_STEPS) * self._step_s))
        padded_us, aligned_us = dict[int, float](), dict[int, float]()
        # the most expensive first, as the budget may end
        kinds = self._kinds()
        narrower, too_late = dict[int, float](), frozenset[int]()
        call_us = {kind: self._us(operations[rows[0]]) / operations[rows[0]].calls for kind, rows in kinds.items()}
        if bf16_may_gain(measured):
            worth = {kind: rows for kind, rows in kinds.items() if self._kind_us(rows) >= WORTH * self._step.us}
            until = self.deadline.within(IN_BF16 * self._budget)
            narrower, too_late = shares_in_bf16(operations, worth, samples, call_us, self.device, until)
        until = self.deadline.within(IN_BF16 * self._budget)
        in_fp32 = shares_in_fp32(operations, kinds, samples, call_us, slow_dtypes(measured), self.device, until)
        recorded = {
            kind: Recorded(samples[kind], self._us(operations[rows[0]]) / operations[rows[0]].calls)
            for kind, rows in kinds.items() if kind in samples
        }  # fmt: skip

        def is_settled(kind: Kind, found: Evidence) -> bool:
            operation = recorded[kind].sample.operation
            roofs = machine.roofs_of(operation, self.device, measured)
            return settled(operation, roofs, found) and classify(operation, roofs, found).confidence != "contradicted"

        evidence, refused = measure_all(recorded, self.device, self.deadline.but(self._kept_s), is_settled)
        attentions = self._other_attentions(samples)
        for kind, rows in kinds.items():
            operation = operations[rows[0]]
            sample = samples.pop(kind, None)
            us = self._us(operation) / operation.calls
            if sample is None or operation.op not in PRODUCTS or not can_be_padded(sample):
                continue
            if not self.deadline.allows_rest(4 * us / 1e6):
                continue
            if self._pads:
                saved_us = padded_saving_us(sample, self.device)
                padded_us |= {row: saved_us * operations[row].calls for row in rows}
            if self.device.type == "cuda" and (saved_us := aligned_saving_us(sample, self.device)) > 0:
                aligned_us |= {row: min(saved_us * operations[row].calls, self._us(operations[row])) for row in rows}
        findings = self._findings(measured, evidence)
        if any(map(is_above, findings)) and self.device not in _measured_again:
            # the ceilings were measured while something else ran; or a library needs fewer FLOPs, and once more is enough
            _measured_again.add(self.device)
            measured = ceilings.measure_again(self.device, say=self._say)
            findings = self._findings(measured, evidence)
        step, kernels = self._evidence(), self._kernels(findings)
        left = missing(
            step_us=step.time_us, profiled_us=self._step.timeline.wall_us,
            operators_us=sum(finding.time_us for finding in findings) - self._step.timeline.copied_us * self._step.shrink,
            idle_us=sum(step.idle_us.values()), replayed_us=self._step.timeline.replayed_us * self._step.shrink,
            on_gpu=self.device.type == "cuda",
        )  # fmt: skip
        seen = ObservedStep(
            device=self.device, ceilings=measured, step=step, findings=findings, calls=self._watch.calls,
            wider=in_fp32,
            kept=self._watch.kept, busy_us=self._step.timeline.busy_us * self._step.shrink, launches=self._step.timeline.launches,
            kernels=kernels, attentions=attentions, narrower=narrower, too_late=too_late, aligned_us=aligned_us,
            queue=self._queue(), cast_us=cast_us(self.device) if bf16_may_gain(measured) else 0.0,
            sync_us=self._step.idle.lines("sync"), waits=self._step.idle.waits, threads=torch.get_num_threads(),
        )  # fmt: skip
        remedies = [
            replace(r, measured_us=padded_us[r.ops[0]]) if r.name == PAD and r.ops[0] in padded_us else r for r in propose(seen)
        ]
        if not any(r.name.startswith(DTYPE) for r in remedies):
            notes += why_no_price(seen)
        notes += why_not_compiled(seen) + why_above(findings, measured)
        return diagnosis(
            machine=describe(self.device).json(), ceilings=measured.json(),
            program=Program(command=_command(), step=self._name, torch=torch.__version__, mode=self._mode),
            step=step, findings=findings, remedies=remedies, launches=seen.launches,
            peak_bytes=self._peak_bytes,
            busy_us=seen.busy_us, kernels=kernels, counters=counted,
            notes=[*self._step.noise(), *self._step.idle.notes(), *left, *notes, *refused],
            trace=Trace(self._step.profiled.trace, findings),
        )  # fmt: skip

    @property
    def _step_s(self) -> float:
        return self._step.us / 1e6

    @property
    def compiling_s(self) -> float:
        """The time that trying compiled code is expected to take."""
        return expected_s(self._watch.operations, self.device, self._step_s)

    @property
    def _kept_s(self) -> float:
        """The time that experiments on operators leave: for the step as a graph, with other batches, compiled; for attentions."""
        attentions_s = IN_ATTENTIONS * self._budget if self.device.type == "cuda" and self._attentions else 0.0
        if self._resized is None:
            return attentions_s
        steps_s = min(needed_steps(self.device) * self._step_s, IN_STEPS * self._budget)
        compiles = self._compiles and self._mode == "eager" and self.compiling_s <= IN_COMPILING * self._budget
        return attentions_s + steps_s + (self.compiling_s if compiles else 0.0)

    def _queue(self) -> Queue | None:
        """The launches of the step on a GPU, at the pace that the host has without a profiler."""
        timeline = self._step.timeline
        if not timeline.launched:
            return None
        launches = tuple(one._replace(device_us=one.device_us * self._step.shrink) for one in timeline.launched)
        return Queue(launches, timeline.tail_us).paced(median(self._launched))

    @property
    def _mode(self) -> str:
        if self._step.timeline.replayed_us > self._step.timeline.busy_us / 2:
            return "graph"
        is_compiled = any(operation.op.startswith(NAMESPACE) for operation in self._watch.operations)
        return "compiled" if is_compiled else "eager"

    def _findings(self, measured: Ceilings, evidence: Mapping[Kind, Evidence]) -> list[Finding]:
        """A finding for each operation, in the order of the watch."""
        return [
            find(
                operation, machine.roofs_of(operation, self.device, measured), evidence.get(operation.kind),
                self._us(operation) or None,
            )
            for operation in self._watch.operations
        ]  # fmt: skip

    @cached_property
    def _attentions(self) -> list[StepAttention]:
        """The attentions of the step, if they take a part of its time."""
        operations = self._watch.operations
        found = find_attentions(operations, self._watch.calls)
        worth = sum(self._us(operations[row]) for one in found for row in one.rows)
        return found if worth >= ATTENTION_SHARE * self._step.us else []

    def _other_attentions(
        self, samples: Mapping[Kind, Sample]
    ) -> list[tuple[StepAttention, Mapping[str, float], str]]:  # fmt: skip
        """The step's attentions with the times of others on the same shapes."""
        operations = self._watch.operations
        timed: dict[tuple[object, ...], tuple[Mapping[str, float], str] | None] = {}
        found = []
        for one in self._attentions:
            kind = (one.q, one.k, one.v, one.backward)
            if kind not in timed:
                sample = samples.get(operations[one.main].kind)
                call_us = sum(self._us(operations[row]) for row in one.rows) / one.calls
                timed[kind] = time_ours(one, sample, self.device, call_us, self.deadline) if sample is not None else None
            if (others := timed[kind]) is not None:
                found.append((one, *others))
        return found

    def _evidence(self) -> StepEvidence:
        us, idle = self._step.us, self._step.idle
        spread = 1.25 * (max(self._taken) - min(self._taken)) / len(self._taken)
        why_not: dict[str, str] = {}
        on_gpu = self.device.type == "cuda"
        graph_us = self._graph_us(why_not) if on_gpu else None
        if not on_gpu:
            why_not["graph"] = "needs a GPU"
        half, double = self._batches_us(why_not)
        return StepEvidence(
            time_us=us, spread_us=spread, graph_us=graph_us, half_batch_us=half, double_batch_us=double,
            idle_us=idle.by_cause, waiting_us=idle.waiting_us, why_not=why_not,
            host_us={place.words: us for place, us in idle.waits.items()},
        )  # fmt: skip

    def _graph_us(self, why_not: dict[str, str]) -> float | None:
        """The time of the step as a CUDA graph; None, with the reason, if it cannot be captured."""
        step = self._resized(1.0) if self._resized is not None else None
        if step is None:
            why_not["graph"] = WITH_OTHERS if are_several() else NOT_TRIED
            return None
        operators: Counter[str] = Counter()
        for operation in self._watch.operations:
            operators[operation.op] += operation.calls
        try:
            return self._step.us * replayed_share(step, self.device, operators, step_s=self._step_s, deadline=self.deadline)
        except Unsupported as reason:
            why_not["graph"] = str(reason)
            return None

    def _batches_us(self, why_not: dict[str, str]) -> tuple[float | None, float | None]:
        """The times of the step with half and twice the batch; None where it cannot be run, with the reason."""
        if self._resized is None or (step := self._resized(1.0)) is None:
            why_not["batch"] = WITH_OTHERS if are_several() else NO_INPUTS
            return None, None
        if self._mode == "compiled":
            why_not["batch"] = "its code would be compiled again for another batch, which takes longer than the experiment"
            return None, None
        others = {factor: other for factor in (0.5, 2.0) if (other := self._resized(factor)) is not None}
        shares, reason = batch_shares(step, others, self.device, self._step_s, self.deadline)
        if len(others) < 2 or reason:
            why_not["batch"] = reason or "the inputs have no first axis in common"
        half, double = (self._step.us * shares[factor] if factor in shares else None for factor in (0.5, 2.0))
        return half, double

    def _kernels(self, findings: Sequence[Finding]) -> dict[int, Sequence[str]]:
        """The names of the kernels of each row."""
        names = [self._step.timeline.kernels_of(f.operation.op, f.operation.shapes) for f in findings]
        return {row: its for row, its in enumerate(names) if its}


def _command() -> str:
    """The command line without the folder of its program: a page is shared, and a home folder has a name in it."""
    program, *arguments = sys.argv
    path = Path(program)
    words = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    return shlex.join([*words, *arguments])
