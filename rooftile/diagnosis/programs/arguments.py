"""The arguments of a function or module that a caller gives: in their order, or one dictionary of them by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn


def arguments_of(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments by position and by name: a single dictionary of names that the function has means these.

    A function or module that takes a dictionary as its argument gets it, unless its keys are names of its arguments.
    """
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping):
        return tuple(inputs), {}
    given = inputs[0]
    called = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(called).parameters.values()
    by_name = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes_any = any(one.kind == one.VAR_KEYWORD for one in parameters)
    is_named = bool(given) and all(isinstance(name, str) for name in given)
    if is_named and (by_name.issuperset(given) or (takes_any and by_name.intersection(given))):
        return (), dict(given)
    return tuple(inputs), {}
