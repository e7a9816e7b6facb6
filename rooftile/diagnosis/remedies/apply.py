"""Tries remedies: runs the step with a change that is made from outside of the program, and times it.

    compile    torch.compile of the outermost modules
    attention  `rooftile.enable`, and attn_implementation="rooftile" in models of Transformers
    dtype      torch.autocast to bf16

The other changes need no run of their own: a CUDA graph and a batch are experiments (E1, E2), and a padded product is timed
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.remedies import recorded
from rooftile.diagnosis.remedies.remedy import ATTENTION, BATCH, COMPILE, DTYPE, GRAPH, PAD, Remedy
from rooftile.diagnosis.watching.steps import Finished, Lead, Role, StepTimer
from rooftile.errors import InvalidInput, Unsupported
from rooftile.integrations import enabled

# what the caller writes, and the remedy that it tries
NAMES = {"graph": GRAPH, "compile": COMPILE, "attention": ATTENTION, "dtype": f"{DTYPE}: bf16", "batch": BATCH, "pad": PAD}
BY_RUNNING = ("compile", "attention", "dtype")
WARM_UPS, TIMED_STEPS = 2, 7
# a step that takes this many times as long with a change in both looks is not timed further; in one of them it may have compiled
HOPELESS, LOOKS = 3, 2
# pairs of steps, without and with the change, that tell what it saves
LEAST_PAIRS = 3
# seconds that torch.compile takes to begin, and for each call of an operator; a CPU's compiler is the slower one
COMPILER_S, CALL_S = 5.0, {"cpu": 0.2, "cuda": 0.05}


def check(names: Sequence[str]) -> None:
    """Refuses a name that is no remedy to try."""
    for name in names:
        if name not in NAMES:
            raise InvalidInput(f"apply has {name!r}; it takes {', '.join(NAMES)}")


def expected_s(operations: Sequence[OperatorRow], device: torch.device, step_s: float) -> float:
    """Returns how long it is expected to take to compile a step with these operators, and to compare the two."""
    in_modules = [operation for operation in operations if operation.module]
    calls = sum(operation.calls for operation in in_modules or operations)
    return COMPILER_S + CALL_S[device.type] * calls + (1 + WARM_UPS + LOOKS + 4 * LEAST_PAIRS) * step_s


class Trial:
    """One change, tried on a few steps of a program, in turns with steps without it.

    The first step finds the modules that the program calls. Between steps the program is as it was.

    Args:
        name: one of `BY_RUNNING`.
        device: where the step runs.
        step_us: its time without the change. A change that makes it far slower is not tried to the end.
        deadline: no step begins that is not expected to end by then; None: there is none.
    """

    def __init__(self, name: str, device: torch.device, step_us: float, deadline: Deadline | None = None) -> None:
        self.name, self._device, self._step_us = name, device, step_us
        self._deadline = deadline or Deadline()
        self.modules: list[nn.Module] = []
        self._compiled: list[Any] = []
        self._looks: list[float] = []
        self._before: list[float] = []
        self._after: list[float] = []

    @property
    def roles(self) -> list[Role]:
        """One for each step."""
        timed: list[Role] = [self._timed_before, self._timed_after] * TIMED_STEPS
        if self._is_led:
            timed = [self._leading_before, self._timed_before, self._leading_after, self._timed_after] * TIMED_STEPS
        return [self._finding, *([self.changed] * WARM_UPS), *([self._looking] * LOOKS), *timed]

    def is_changed(self, number: int) -> bool:
        """Whether the change is there in a step; the first has the number 0."""
        return self.roles[number] not in (self._finding, self._leading_before, self._timed_before)

    @property
    def saved_us(self) -> float:
        """The time that the diagnosed step loses by the change.

        The share comes from neighbours in time, because a chip and busy cores are slower at times; the price has the same step.
        """
        left = median(after / before for before, after in zip(self._before, self._after, strict=True))
        return self._step_us * (1 - left)

    @contextmanager
    def changed(self) -> Iterator[None]:
        """The change is there within the block."""
        with ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(self._changed_module(module))
            if self.name == "attention":
                stack.enter_context(enabled())
            elif self.name == "dtype":
                stack.enter_context(torch.autocast(self._device.type, torch.bfloat16))
            yield

    def _in_time(self) -> None:
        """Ends the trial where the deadline allows no more steps: with the pairs that there are, if they tell something."""
        if self._deadline.allows((4 if self._is_led else 2) * self._step_us / 1e6):
            return
        if len(self._after) < LEAST_PAIRS:
            raise Unsupported("the budget ended before enough steps had run with it")
        raise Finished

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self._in_time()
        with self.changed(), StepTimer(self._device, self._looks):
            yield
        if len(self._looks) == LOOKS and min(self._looks) > HOPELESS * self._step_us:
            self._before, self._after = [self._step_us], [min(self._looks)]
            raise Finished

    @contextmanager
    def _finding(self) -> Iterator[None]:
        depth = 0

        def begin(module: nn.Module, unused: object) -> None:
            nonlocal depth
            if depth == 0 and all(module is not known for known in self.modules):
                self.modules.append(module)
            depth += 1

        def end(*unused: object) -> None:
            nonlocal depth
            depth -= 1

        hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def _changed_module(self, module: nn.Module) -> Iterator[None]:
        if self.name == "compile":
            before = module._compiled_call_impl
            module._compiled_call_impl = self._compiled_call(module)
            try:
                yield
            finally:
                module._compiled_call_impl = before
        elif self.name == "attention" and hasattr(module, "set_attn_implementation"):
            implementation = module.config._attn_implementation  # type: ignore[union-attr]
            module.set_attn_implementation("rooftile")  # type: ignore[operator]
            try:
                yield
            finally:
                module.set_attn_implementation(implementation)  # type: ignore[operator]
        else:
            yield

    def _compiled_call(self, module: nn.Module) -> Any:
        for known, call in self._compiled:
            if known is module:
                return call
        self._compiled.append((module, torch.compile(module._call_impl)))
        return self._compiled[-1][1]

    @property
    def _is_led(self) -> bool:
        return self._device.type == "cuda"

    @contextmanager
    def _leading_before(self) -> Iterator[None]:
        self._in_time()
        with Lead(self._device):
            yield

    @contextmanager
    def _timed_before(self) -> Iterator[None]:
        if not self._is_led:
            self._in_time()
        with StepTimer(self._device, self._before, led=self._is_led):
            yield

    @contextmanager
    def _leading_after(self) -> Iterator[None]:
        with self.changed(), Lead(self._device):
            yield

    @contextmanager
    def _timed_after(self) -> Iterator[None]:
        with self.changed(), StepTimer(self._device, self._after, led=self._is_led):
            yield


def tried(
    found: Diagnosis, names: Sequence[str], device: torch.device, run: Callable[[Trial], None], deadline: Deadline | None = None
) -> Diagnosis:  # fmt: skip
    """Returns a diagnosis with the measured savings of remedies, and a note for each that could not be tried.

    Args:
        found: the diagnosis.
        names: keys of `NAMES`.
        device: where the step runs.
        run: runs a step of the program in each role of a trial.
        deadline: no step of a trial begins that is not expected to end by then; None: there is none.
    """
    for name in names:
        if name in BY_RUNNING:
            trial = Trial(name, device, found.step.time_us, deadline)
            try:
                with suppress(Finished):
                    run(trial)
            except Exception as error:
                # errors of a compiler, and of a step that cannot run the change, have no common class
                found = found.noted(f"{name} could not be tried: {_first_line(error)}")
            else:
                found = found.measured(NAMES[name], trial.saved_us)
        elif all(r.measured_us is None for r in found.remedies if r.name == NAMES[name]):
            saved_us, why_not = _by_experiment(name, found)
            if saved_us is None:
                found = found.noted(f"{name} could not be tried: {why_not}")
            else:
                found = found.measured(NAMES[name], saved_us)
    return found


def compile_price_noted(found: Diagnosis, device: torch.device, how: str) -> Diagnosis:
    """Returns a diagnosis whose price of compile, where it was not tried, says how such prices fared, and how to try it."""

    def noted(remedy: Remedy) -> Remedy:
        if remedy.name != COMPILE or remedy.measured_us is not None:
            return remedy
        return replace(remedy, how=f"{remedy.how}; {recorded.words(device.type)}: {how}")

    return replace(found, remedies=tuple(map(noted, found.remedies)))


def _by_experiment(name: str, found: Diagnosis) -> tuple[float | None, str]:
    """The saving of a change that an experiment has made, or the reason why it was not made."""
    step, made = found.step, found.step.experiments
    if name == "graph":
        us = made["graph_us"]
        return (None, made["why_not"].get("graph", "")) if us is None else (step.time_us - us, "")
    if name == "batch":
        us = made["double_batch_us"]
        return (None, made["why_not"].get("batch", "")) if us is None else (step.time_us - us / 2, "")
    return None, "no product of the step gains from other sizes"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
