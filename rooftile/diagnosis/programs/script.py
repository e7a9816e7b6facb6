"""Runs a script and finds its step.

The step is, in this order: the function that the caller names; what runs inside `with rooftile.diagnosis.step():`; from one
`Optimizer.step` to the next; from the end of one backward to the next; a turn of a loop that calls several modules, or a library
that does; the outermost call of a module, which can be called again when the script has ended.
"""

from __future__ import annotations

import _thread
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rooftile.diagnosis.programs.loops import Turns
from rooftile.diagnosis.programs.named import Reached, ScriptCall, named
from rooftile.diagnosis.watching.dispatched import optimiser_steps
from rooftile.diagnosis.watching.modes import Modes
from rooftile.diagnosis.watching.steps import Finished, Source, Steps, watching
from rooftile.diagnosis.watching.unseen import pass_over
from rooftile.diagnosis.watching.where import user_line
from rooftile.errors import InvalidInput
from rooftile.runtime.operators import in_backward

# outermost calls of modules without an optimiser's step, after which a program that goes on is one that only calls
MANY_CALLS = 32


# steps that a run of the script must have, or it is not run again for more
FEWEST = 3


def run(
    path: str, arguments: Sequence[str], steps: Steps, kept: ExitStack, *, function: str | None = None, patience: float = 600.0
) -> ScriptCall | None:  # fmt: skip
    """Runs a script until its steps have been seen.

    Args:
        path: the script.
        arguments: its own, as in sys.argv[1:].
        steps: what is done at each step that the script marks, or that its optimiser ends.
        kept: closed when the call is no longer needed: compiled code is bound to how its modules are called.
        function: the name of its step's function, such as "train_step" or "Trainer.step".
        patience: seconds until the first step; and seconds for which a script may call modules without one, until the call of a
            module counts as its step.

    A script that ends after three or more steps is run again until there are enough.

    Returns:
        The call to be made again: of the named function, else of the outermost module. None if `steps` has seen all of its.

    Raises:
        InvalidInput: there is no such file; the named function was never called; no step was found, or too few, or none in time;
            the script failed.
    """
    if not Path(path).is_file():
        raise InvalidInput(f"{path} is not a file; give the path of a Python script")
    while True:
        source, seen = steps.source, steps.seen
        call = _run_once(path, arguments, steps, kept, function, patience)
        if steps.is_finished:
            return None
        # the part of a script before the first end of a step is not counted as seen, and is a step all the same
        made = steps.seen - (seen if steps.source == source else 0) + (steps.source != Source.MARKS)
        if call is not None and (not steps.is_stepping or made < FEWEST):
            return call
        if made < FEWEST:
            raise InvalidInput(
                f"{path} ended after {made} steps; needs at least {FEWEST}: let it run longer, or name a function by --step"
            )
        steps.run_again()


def _run_once(
    path: str, arguments: Sequence[str], steps: Steps, kept: ExitStack, function: str | None, patience: float
) -> ScriptCall | None:  # fmt: skip
    """Runs the script from its beginning to its end, or until all steps have been seen.

    Returns the call that can be made again; None if the script has steps that end with a backward, an optimiser or its marks.
    """
    calls: list[ScriptCall] = []
    turns = Turns(steps)
    with (
        _as_main(path, arguments), watching(steps), turns.watched(), _modules(calls, turns, steps, patience, kept),
        _optimisers(steps, turns), named(function),
    ):  # fmt: skip
        alarm = _Alarm(patience, lambda: not steps.is_stepping and not calls)
        try:
            runpy.run_path(path, run_name="__main__")
        except Reached as reached:
            return reached.call
        except Finished:
            steps.is_finished = True
            return None
        except KeyboardInterrupt:
            if not alarm.rang:
                raise
            raise InvalidInput(
                f"{path} has reached no step in {patience:g} seconds; name a function by --step, or give it more by --budget"
            ) from None
        except SystemExit as error:
            if error.code not in (None, 0):
                raise InvalidInput(f"{path} ended with exit code {error.code} before its step had been seen") from error
        except InvalidInput:
            raise
        except Exception as error:
            if steps.is_own_work:
                raise
            reason = f"{path} failed with {type(error).__name__}: {error} ({_line_of(error)})"
            if not calls or steps.source > Source.MODULES:
                raise InvalidInput(f"{reason} before enough of its steps had been seen; run it by itself first") from error
            # the calls of its modules were good until then
            return calls[-1]._replace(note=f"{reason} after {calls[-1].name}, which is what was diagnosed")
        finally:
            alarm.off()
            if steps.is_elsewhere:
                # a process that the script has forked has reached the script's end: its diagnosis was not asked for
                os._exit(0)
    if function is not None:
        raise InvalidInput(f"{path} never called {function}; name a function that it calls, as in --step train_step")
    if steps.source > Source.MODULES:
        return None
    if not calls:
        raise InvalidInput(
            f"{path} has no step: no optimiser stepped and no module was called; name a function by --step, or mark the step "
            "with `with rooftile.diagnosis.step():`"
        )
    return calls[-1]


@contextmanager
def _as_main(path: str, arguments: Sequence[str]) -> Iterator[None]:
    kept = sys.argv, sys.path[:]
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = kept


class _Alarm:
    """Interrupts the main thread after a time, if nothing has happened until then."""

    def __init__(self, seconds: float, is_due: Callable[[], bool]) -> None:
        self.rang = False
        self._is_due = is_due
        # a shell's background job ignores the signal, and would ignore this interrupt
        self._ignored = (
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread()
        )
        if self._ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def off(self) -> None:
        self._timer.cancel()
        if self._ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _ring(self) -> None:
        if self._is_due():
            self.rang = True
            _thread.interrupt_main()


@contextmanager
def _modules(calls: list[ScriptCall], turns: Turns, steps: Steps, patience: float, kept: ExitStack) -> Iterator[None]:
    """Keeps the last outermost call of a module, and ends a script that goes on calling modules without any other step.

    The function by which modules are called stays until `kept` is closed: a program that was compiled meanwhile would be compiled
    again without it.
    """
    original = nn.Module.__call__
    depth = count = 0
    first = 0.0

    # a compiler may be at work around a call, and would compile these as a part of the program
    @torch.compiler.disable
    def begin(caller: FrameType) -> Modes:
        nonlocal count, first
        if not steps.is_stepping:
            count += 1
            first = first or time.monotonic()
            if count > MANY_CALLS and time.monotonic() - first > patience:
                raise Reached(calls[0])
        if steps.source <= Source.MODULES and not in_backward():
            turns.note_call(caller)
        return Modes.now()

    @torch.compiler.disable
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], modes: Modes, caller: FrameType) -> None:
        where = user_line(caller)
        name = f"the call of {type(module).__name__}{f' at {where}' if where else ''}"
        calls[:] = [ScriptCall(module, args, kwargs, name, modes)]

    def noted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if torch.compiler.is_compiling() or depth:
            # torch.compile(model) holds this function as the model's own call: what follows is no part of the program
            return original(self, *args, **kwargs)
        modes = begin(sys._getframe(1))
        depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            depth -= 1
        # a call that has failed would fail again
        keep(self, args, kwargs, modes, sys._getframe(1))
        return result

    # Dynamo passes over PyTorch's own function as well. It would compile this one for each class of module, up to eight of them,
    # and run the program's other compiled modules, and the ladders of the experiments, without a compiler
    pass_over(noted)
    nn.Module.__call__ = noted  # type: ignore[method-assign]
    kept.callback(setattr, nn.Module, "__call__", original)
    try:
        yield
    finally:
        # nothing more is noted
        depth = 1


@contextmanager
def _optimisers(steps: Steps, turns: Turns) -> Iterator[None]:
    """A step ends with each step of the first optimiser that makes one; a program that marks its steps itself is left alone."""
    first: list[Optimizer] = []
    original = Optimizer.__init__

    def made(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        # a script that tests its model before it trains is known by its training
        turns.will_train = True
        original(self, *args, **kwargs)

    def ended(optimiser: Optimizer, args: Any, kwargs: Any) -> None:
        first.append(optimiser)
        if optimiser is first[0] and steps.follows(Source.OPTIMISER):
            steps.boundary()

    with optimiser_steps:
        handle = register_optimizer_step_post_hook(ended)
        Optimizer.__init__ = made  # type: ignore[method-assign]
        try:
            yield
        finally:
            Optimizer.__init__ = original  # type: ignore[method-assign]
            handle.remove()


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's code that an error came from."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        found = user_line(traceback.tb_frame, traceback.tb_lineno, outwards=False) or found
        traceback = traceback.tb_next
    return found
