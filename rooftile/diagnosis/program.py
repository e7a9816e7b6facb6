"""`rooftile diagnose SCRIPT`: a script's step, found and diagnosed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.observer import Observer
from rooftile.diagnosis.remedies.apply import Trial, check, tried
from rooftile.diagnosis.run import diagnose
from rooftile.diagnosis.script import run
from rooftile.diagnosis.steps import Finished, Steps
from rooftile.errors import InvalidInput

# seconds that a script may take to reach its first step, where the budget does not give it more
LEAST_PATIENCE = 60.0


def diagnose_script(
    path: str, arguments: Sequence[str] = (), *, function: str | None = None, device: str | None = None,
    apply: Sequence[str] = (), budget: float = 60.0, ncu: bool = False,
) -> Diagnosis:  # fmt: skip
    """Runs a script, finds its step and diagnoses it; see `diagnosis.script` for what counts as a step.

    A script that marks its steps, or whose optimiser ends them, is watched while it runs, and stopped when enough was seen. A
    named function, or a module of a script without either, is called again some twenty times when the script has reached it.

    Args:
        path: the script.
        arguments: its own.
        function: the name of the function that is its step.
        device: "cpu" or "cuda", where its step is expected to run; None for any.
        apply: remedies to try, as in `rooftile.diagnose`; a script is run once more for each.
        budget: seconds that the experiments may take.
        ncu: also count bytes by Nsight Compute.

    Raises:
        InvalidInput: there is no such file, no step was found, the script ended before enough steps were seen, or its step runs
            on another device.
    """
    check(apply)
    found: list[Diagnosis] = []
    observer = Observer(f"a step of {path}", budget, pads="pad" in apply, ncu=ncu)

    def done() -> None:
        _check_device(device, observer.device)
        found.append(observer.conclude())
        raise Finished

    call = run(path, arguments, Steps(observer.roles, done), function=function, patience=max(LEAST_PATIENCE, 10 * budget))
    if call is None:
        return tried(found[0], apply, observer.device, lambda trial: _again(path, arguments, trial))

    def step() -> object:
        return call.function(*call.args, **call.kwargs)

    step.__qualname__ = call.name
    named = diagnose(step, apply=apply, budget=budget, ncu=ncu)
    _check_device(device, torch.device(named.machine["type"]))
    return named


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

    run(path, arguments, Steps(trial.roles, done))
