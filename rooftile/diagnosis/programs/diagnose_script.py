"""`rooftile diagnose SCRIPT`: a script's step, found and diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.observer import Observer
from rooftile.diagnosis.programs.diagnose_call import diagnose_call
from rooftile.diagnosis.programs.script import run
from rooftile.diagnosis.remedies.apply import Trial, check, compile_price_noted, tried
from rooftile.diagnosis.watching.steps import Finished, Steps
from rooftile.errors import InvalidInput

# seconds that a script may take to reach its first step, where the budget does not give it more
LEAST_PATIENCE = 60.0


def diagnose_script(
    path: str, arguments: Sequence[str] = (), *, function: str | None = None, device: str | None = None,
    apply: Sequence[str] = (), budget: float = 60.0, ncu: bool = False, say: Callable[[str], None] = lambda words: None,
) -> Diagnosis:  # fmt: skip
    """Runs a script, finds its step and diagnoses it; see `rooftile.diagnosis.programs.script` for what counts as a step.

    A script that marks its steps, or whose optimiser ends them, is watched while it runs, and stopped when enough was seen. A
    named function, or a module of a script without either, is called again some twenty times when the script has reached it, also
    with half and twice its batch. A script with few steps is run several times.

    Args:
        path: the script.
        arguments: its own.
        function: the name of the function that is its step.
        device: "cpu" or "cuda", where its step is expected to run; None for any.
        apply: remedies to try, as in `rooftile.diagnose`; a script is run once more for each.
        budget: seconds that the experiments may take.
        ncu: also count bytes by Nsight Compute.
        say: is called with words about what is measured once on a machine.

    Raises:
        InvalidInput: there is no such file, no step was found, the script failed or has fewer than three steps, or its step runs
            on another device.
    """
    check(apply)
    found: list[Diagnosis] = []
    observer = Observer("a step", budget, pads="pad" in apply, ncu=ncu, say=say)

    def done() -> None:
        _check_device(device, observer.device)
        found.append(observer.conclude())
        raise Finished

    steps = Steps(observer.roles, done)
    with ExitStack() as kept:
        call = run(path, arguments, steps, kept, function=function, patience=max(LEAST_PATIENCE, 10 * budget))
        if call is None:
            whole = tried(found[0], apply, observer.device, lambda trial: _again(path, arguments, trial))
            whole = compile_price_noted(whole, observer.device, "--apply compile tries it, in one more run of the script")
            words = f"{path} was run {steps.runs} times until enough of its steps had been seen"
            return whole.noted(words) if steps.runs > 1 else whole

        def step(*inputs: Any, **named: Any) -> Any:
            with call.modes.again():
                return call.function(*inputs, **named)

        step.__qualname__ = call.name
        called = diagnose_call(step, call.args, call.kwargs, apply=apply, budget=budget, ncu=ncu, say=say)
        _check_device(device, torch.device(called.machine["type"]))
        return called.noted(call.note) if call.note else called


def _check_device(expected: str | None, found: torch.device) -> None:
    if expected is not None and torch.device(expected).type != found.type:
        raise InvalidInput(
            f"the step ran on {found.type}, and {expected} is expected; the script decides where its step runs: move its tensors "
            "there, or leave --device out"
        )


def _again(path: str, arguments: Sequence[str], trial: Trial) -> None:
    """Runs a script again, with a change."""

    def done() -> None:
        raise Finished

    with ExitStack() as kept:
        run(path, arguments, Steps(trial.roles, done), kept)
