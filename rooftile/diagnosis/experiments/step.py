"""The experiments on a whole step: replayed as a CUDA graph (E1), and with another batch (E2)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from rooftile.diagnosis.experiments import deadline as budget
from rooftile.diagnosis.experiments.capture import capturing
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.watching.dispatched import Dispatched
from rooftile.diagnosis.watching.steps import Lead, StepTimer
from rooftile.diagnosis.watching.watch import name_of
from rooftile.errors import Unsupported

Work = Callable[[], None]
WARM_UPS = 3


class _Turns(NamedTuple):
    """How often works take turns: to warm up, then timed; a GPU runs each `runs` times in a turn."""

    warm_ups: int
    timed: int
    runs: int

    @property
    def steps(self) -> int:
        return self.runs * (self.warm_ups + self.timed)


TURNS = {"cpu": _Turns(3, 7, 1), "cuda": _Turns(1, 5, 2)}
# ... at least, where steps are slow
LEAST = {"cpu": _Turns(1, 3, 1), "cuda": _Turns(1, 3, 2)}
NO_TIME = "the budget has no time for as many steps as it takes: a larger --budget has"


def needed_steps(device: torch.device) -> float:
    """Returns how many of its own steps a step's experiments take."""
    turns = TURNS[device.type]
    return _batch_steps(turns) + (_graph_steps(turns) if device.type == "cuda" else 0.0)


def _graph_steps(turns: _Turns) -> float:
    # it is captured twice
    return WARM_UPS + 2 + 2 * turns.steps


def _batch_steps(turns: _Turns) -> float:
    # half the batch, the batch and twice the batch
    return 3.5 * (turns.steps + 1)


def batch_shares(
    step: Work, others: Mapping[float, Work], device: torch.device, step_s: float, deadline: Deadline
) -> tuple[dict[float, float], str]:  # fmt: skip
    """Returns the time of a step with other batches as shares of its own, and the reason why one is missing.

    All take turns, because a machine is slower at times.

    Args:
        step: the step.
        others: the step with its batch times a factor, by factor.
        device: where it runs.
        step_s: the time of the step.
        deadline: nothing runs that is not expected to end by then.
    """
    works, reason = {1.0: step}, ""
    if not deadline.allows_rest(_batch_steps(LEAST[device.type]) * step_s):
        return {}, NO_TIME
    for factor, other in others.items():
        try:
            other()
        except (RuntimeError, ValueError, IndexError) as error:
            reason = _first_line(error)
        else:
            works[factor] = other
    if len(works) == 1:
        return {}, reason
    try:
        times_us = dict(zip(works, _in_turns(list(works.values()), device, deadline), strict=True))
    except Unsupported as error:
        return {}, str(error)
    return {factor: us / times_us[1.0] for factor, us in times_us.items() if factor != 1}, reason


def replayed_share(
    step: Work, device: torch.device, operators: Mapping[str, int] | None = None, *, step_s: float = 0.0,
    deadline: Deadline | None = None,
) -> float:  # fmt: skip
    """Returns the time of a step as a CUDA graph, its kernels without the host, as a share of its time without one.

    Both take turns, because a chip is slower after a while of hard work.

    Args:
        step: the step.
        device: where it runs.
        operators: how often the step calls each operator; None leaves unchecked whether its capture calls the same.
        step_s: the time of the step.
        deadline: nothing runs that is not expected to end by then; None: there is none.

    Raises Unsupported with the reason if there is no time; if it cannot be captured, because it waits for the device or moves
    data to it; or if it calls other operators while it is captured, as a program may: its graph says nothing about the step then.
    """
    deadline = deadline or Deadline()
    if not deadline.allows_rest(_graph_steps(LEAST[device.type]) * step_s):
        raise Unsupported(NO_TIME)
    graph = torch.cuda.CUDAGraph()
    try:
        # a capture wants what is made in first runs, such as workspaces, to be there
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with warnings.catch_warnings():
            # the program's own gradients were made on another stream than the capture's
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
            # a capture that has failed is empty
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream(device).wait_stream(beside)
            with capturing(graph, device, beside):
                step()
            if operators is not None:
                _check_captured(step, device, beside, operators)
    except (RuntimeError, ValueError, IndexError) as error:
        raise Unsupported(f"the step cannot be captured: {_first_line(error)}") from error
    alone, replayed = _in_turns([step, graph.replay], device, deadline)
    return replayed / alone


def _check_captured(step: Work, device: torch.device, stream: torch.cuda.Stream, operators: Mapping[str, int]) -> None:
    """Refuses a step that calls other operators while it is captured. It is captured once more, and watched."""
    seen: Counter[str] = Counter()
    # a capture itself fills the seed and the offset of random numbers
    with capturing(torch.cuda.CUDAGraph(), device, stream), Dispatched(lambda func, *unused: seen.update([name_of(func)])):
        step()
    changed = {name: seen[name] - operators.get(name, 0) for name in {*seen, *operators}}
    if any(changed.values()):
        most = sorted((name for name, n in changed.items() if n), key=lambda name: -abs(changed[name]))[:3]
        words = ", ".join(f"{changed[name]:+d} {name}" for name in most)
        raise Unsupported(f"while it is captured the step calls other operators ({words}), so its graph is not this step's")


def _in_turns(works: Sequence[Work], device: torch.device, deadline: Deadline) -> list[float]:
    """The times of works that take turns; the first turns warm up.

    Raises Unsupported if the deadline comes before there are enough turns.
    """
    taken: list[list[float]] = [[] for _ in works]
    turns, fewest = TURNS[device.type], LEAST[device.type]
    least, turn_s = fewest.warm_ups + fewest.timed, 0.0
    for turn in range(turns.warm_ups + turns.timed):
        if turn < least and not deadline.allows_rest((least - turn) * turn_s):
            raise Unsupported(NO_TIME)
        if turn >= least and not deadline.allows(turn_s):
            break
        began = budget.clock()
        for work, own in zip(works, taken, strict=True):
            if led := device.type == "cuda":
                with Lead(device):
                    work()
            with StepTimer(device, own, led=led):
                work()
        turn_s = budget.clock() - began
    return [median(own[min(turns.warm_ups, len(own) - fewest.timed) :]) for own in taken]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
