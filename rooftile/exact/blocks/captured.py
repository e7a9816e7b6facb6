"""Finds the values that a mask_mod reads, besides its four positions: a kept mask is right only while these stay as they were.

A function reads closures, default arguments, `functools.partial`, global variables, and attributes and entries that its code
names, also through functions that it calls. A tensor counts as it is, with the counter of its changes in place; a number, a
string or None by its value. An attribute that no code names may change, such as the weights of a model whose method it is.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

# objects that are looked at; a function that reaches more has a whole program behind it
MOST = 4096
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic)
_CONTAINERS = (list, tuple, set, frozenset)
# a name, what it stands for, and the names that occur in the code which reads it
_Read = tuple[str, Any, frozenset[str]]


class Seen(NamedTuple):
    """A value that a function can read."""

    name: str
    value: Any  # plain, or a weak reference to a tensor
    version: Any = None  # a tensor's counter, or in inference mode, which counts no changes, a copy of it

    def is_still(self, now: Seen) -> bool:
        """Whether another look found the same."""
        if isinstance(self.value, ref) != isinstance(now.value, ref):
            return False
        if not isinstance(self.value, ref):
            return type(self.value) is type(now.value) and (self.value == now.value or self.value != self.value)
        x = self.value()
        if x is None or x is not now.value():
            return False
        if isinstance(self.version, Tensor):
            # the host may not read a tensor while a graph is captured
            return (x.is_cuda and torch.cuda.is_current_stream_capturing()) or torch.equal(x, self.version)
        return bool(self.version == now.version)


def captured(function: Any, *, copies: bool = True) -> list[Seen]:
    """Returns the tensors and plain values that a function reads without taking them as arguments.

    copies: whether tensors that count no changes are copied, for a later look to compare with.

    Example:
        >>> document = torch.zeros(8, dtype=torch.long)
        >>> [seen.name for seen in captured(lambda b, h, i, j: document[i] == document[j])]
        ['document']
    """
    found: list[Seen] = []
    visited: dict[Any, Any] = {}
    waiting: list[_Read] = [("mask_mod", function, frozenset())]
    while waiting and len(visited) < MOST:
        name, x, names = waiting.pop()
        if isinstance(x, Tensor):
            found.append(Seen(name, ref(x), _version(x, copies)))
        elif isinstance(x, _PLAIN):
            found.append(Seen(name, x))
        else:
            key = (id(x.__func__), id(x.__self__)) if isinstance(x, types.MethodType) else (id(x), names)
            if key not in visited:
                visited[key] = x
                waiting += _parts(name, x, names)
    return found


def changed(before: list[Seen], now: list[Seen]) -> str | None:
    """Returns the name of the first value that is no longer what it was."""
    for old, new in zip(before, now, strict=False):
        if old.name != new.name or not old.is_still(new):
            return new.name
    more = before[len(now) :] or now[len(before) :]
    return more[0].name if more else None


def _version(x: Tensor, may_copy: bool) -> Any:
    if not x.is_inference():
        return x._version
    return x.clone() if may_copy else None


def _parts(name: str, x: Any, names: frozenset[str]) -> Iterator[_Read]:
    """Yields what the code that reads x, and has these names in it, may read of it."""
    if isinstance(x, types.FunctionType):
        yield from _read_by(x)
    elif isinstance(x, types.MethodType):
        yield from ((name, x.__func__, names), (name, x.__self__, _names(getattr(x.__func__, "__code__", None))))
    elif isinstance(x, functools.partial):
        yield name, x.func, names
        for key, each in (*enumerate(x.args), *x.keywords.items()):
            yield f"{name}'s argument {key}", each, names
    elif isinstance(x, Mapping):
        named = {key for key in x if key in names} or x.keys()
        yield from ((f"{name}[{key!r}]", x[key], names) for key in x if key in named)
    elif isinstance(x, _CONTAINERS):
        yield from ((f"{name}[{n}]", each, names) for n, each in enumerate(x))
    elif isinstance(x, (type, types.ModuleType)):
        held = {key: vars(x)[key] for key in sorted(names) if key in vars(x)}
        yield from ((f"{name}.{key}", each, names) for key, each in held.items() if isinstance(each, (Tensor, *_PLAIN)))
    else:
        yield from _parts_of_object(name, x, names)


def _parts_of_object(name: str, x: Any, names: frozenset[str]) -> Iterator[_Read]:
    for key in ("__call__", "forward"):
        call = next((vars(cls)[key] for cls in type(x).__mro__ if key in vars(cls)), None)
        if isinstance(call, types.FunctionType) and not _is_torchs(call):
            yield name, types.MethodType(call, x), names
    held = _attributes(x)
    for key in sorted(names):
        method = getattr(type(x), key, None)
        if key in held:
            yield f"{name}.{key}", held[key], names
        elif isinstance(method, types.FunctionType):
            yield name, types.MethodType(method, x), names
        elif isinstance(method, property) and isinstance(method.fget, types.FunctionType):
            yield name, types.MethodType(method.fget, x), names


def _attributes(x: Any) -> dict[str, Any]:
    slots = [slot for cls in type(x).__mro__ for slot in _slots(cls)]
    found = {**{slot: getattr(x, slot) for slot in slots if hasattr(x, slot)}, **getattr(x, "__dict__", {})}
    return {**found, **x._parameters, **x._buffers, **x._modules} if isinstance(x, nn.Module) else found


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _read_by(function: types.FunctionType) -> Iterator[_Read]:
    code = function.__code__
    names = _names(code)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        # a variable of the outer function may have no value yet
        if cell != types.CellType():
            yield name, cell.cell_contents, names
    arguments = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    defaults_by_name = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    yield from ((name, x, names) for name, x in (defaults_by_name | (function.__kwdefaults__ or {})).items())
    for name in sorted(names & function.__globals__.keys()):
        x = function.__globals__[name]
        if not _is_torchs(x):
            yield name, x, names


def _is_torchs(x: Any) -> bool:
    """Whether x is one of PyTorch's own functions, which stay as they are."""
    return isinstance(x, types.FunctionType) and str(x.__module__).startswith("torch.")


@functools.cache
def _names(code: types.CodeType | None) -> frozenset[str]:
    """Returns the names and strings in the code of a function and of the functions inside it."""
    if code is None:
        return frozenset()
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    strings = {each for each in code.co_consts if isinstance(each, str)}
    return frozenset(code.co_names).union(strings, *map(_names, inner))
