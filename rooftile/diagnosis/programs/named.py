"""Finds the call of the function that `--step` names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from rooftile.diagnosis.programs.unchanged import is_filled
from rooftile.diagnosis.watching.modes import Modes
from rooftile.errors import InvalidInput

# frames that run no code until a value is asked for
CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR = 0x20, 0x80, 0x200


class ScriptCall(NamedTuple):
    """A call that can be made again."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str  # for the reader
    modes: Modes  # that held around it
    note: str = ""  # what became of the script


class Reached(BaseException):
    """The named function was called: nothing of the script after this is run."""

    def __init__(self, call: ScriptCall) -> None:
        super().__init__()
        self.call = call


class _Target(NamedTuple):
    """The code that a call of a global runs."""

    code: CodeType
    function: Callable[..., Any]
    owner: Any = None  # the first argument of a method
    cells: tuple[tuple[str, Any], ...] = ()  # what a closure holds, which tells it from others of the same code

    def is_run_by(self, frame: FrameType) -> bool:
        if frame.f_code is not self.code:
            return False
        found = frame.f_locals
        if self.owner is not None and found.get(self.code.co_varnames[0]) is not self.owner:
            return False
        return all(found.get(name) is value for name, value in self.cells)


@contextmanager
def named(name: str | None) -> Iterator[None]:
    """Stops the script when it calls what has this name.

    It is a function by its qualified name ("train_step", "Trainer.step"), or what a global of the script holds ("step",
    "trainer.step"): also a closure, a partial function, a lambda, a bound method, or an object that can be called, as a module.
    """
    if name is None:
        yield
        return
    held: Any = None
    target: _Target | None = None

    def reached(frame: FrameType, event: str, unused: Any) -> None:
        nonlocal held, target
        if event != "call":
            return
        if frame.f_code.co_qualname.removeprefix("<module>.") == name:
            sys.setprofile(None)
            raise Reached(_call_of(frame, name))
        now = _global(name)
        if now is not held:
            held, target = now, _target(now)
        if target is not None and target.is_run_by(frame):
            sys.setprofile(None)
            args, kwargs = _arguments(frame, name)
            raise Reached(ScriptCall(target.function, args[target.owner is not None :], kwargs, name, Modes.now()))

    sys.setprofile(reached)
    try:
        yield
    finally:
        sys.setprofile(None)


def _global(name: str) -> Any:
    """Returns the object that a global name of the script holds at present; None if there is no such name."""
    first, *rest = name.split(".")
    found = vars(sys.modules["__main__"]).get(first)
    for word in rest:
        # no property of the script's is run for this
        found = getattr(found, word, None) if isinstance(getattr(type(found), word, None), FunctionType) else None
    return found


def _target(thing: Any) -> _Target | None:
    if isinstance(thing, partial):
        return _target(thing.func)
    if isinstance(thing, MethodType):
        return _Target(thing.__func__.__code__, thing, thing.__self__) if isinstance(thing.__func__, FunctionType) else None
    if isinstance(thing, FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        return _Target(thing.__code__, thing, cells=tuple((name, cell.cell_contents) for name, cell in cells if is_filled(cell)))
    if isinstance(thing, type) or thing is None:
        return None
    called = type(thing).forward if isinstance(thing, nn.Module) else getattr_static(type(thing), "__call__", None)
    return _Target(called.__code__, thing, thing) if isinstance(called, FunctionType) else None


def _call_of(frame: FrameType, name: str) -> ScriptCall:
    args, kwargs = _arguments(frame, name)
    *owner, last = name.split(".")
    if owner:
        return ScriptCall(getattr(args[0], last), args[1:], kwargs, name, Modes.now())
    if last not in frame.f_globals:
        raise InvalidInput(f"{name} is defined inside another function; name one of the module's, or a method as Class.method")
    return ScriptCall(frame.f_globals[last], args, kwargs, name, Modes.now())


def _arguments(frame: FrameType, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments that a function was called with."""
    code = frame.f_code
    if code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        raise InvalidInput(f"{name} is a generator or a coroutine, whose call runs nothing; name a function that runs one step")
    count = code.co_argcount
    args = [frame.f_locals[word] for word in code.co_varnames[:count]]
    keywords = code.co_varnames[count : count + code.co_kwonlyargcount]
    kwargs = {word: frame.f_locals[word] for word in keywords}
    rest = list(code.co_varnames[count + code.co_kwonlyargcount :])
    if code.co_flags & 0x04:
        args += frame.f_locals[rest.pop(0)]
    if code.co_flags & 0x08:
        kwargs |= frame.f_locals[rest.pop(0)]
    return tuple(args), kwargs
