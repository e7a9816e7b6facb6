"""Chooses the backend for a problem, and explains why the others do not run it.

ORDER is a decision, fastest first, written where a reader sees it. Choosing touches no tensor and imports no kernel language.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

from rooftile.exact.backends import eager, hopper, sdpa, tiled, triton
from rooftile.exact.spec import Grads, Spec, decode
from rooftile.numerics.precision import ValueOrder
from rooftile.runtime.devices import warn_without_triton
from rooftile.runtime.dispatch import Dispatcher

ORDER: tuple[ModuleType, ...] = (hopper, triton, sdpa, tiled, eager)
BACKENDS: dict[str, ModuleType] = {backend.NAME: backend for backend in ORDER}

# functions that one backend's backward borrows from another: `repair` computes the gradients again where a NaN spoiled what the
# mask should hide, `bias_gradient` computes the gradient of a bias, and `far_backward` computes gradients from the inputs
# alone, where scores share a large offset
LENT: dict[str, dict[str, Callable[..., Any]]] = {
    hopper.NAME: {"repair": triton.repair, "bias_gradient": triton.bias_gradient},
    sdpa.NAME: {"far_backward": tiled.backward_of_inputs},
}


def value_order(name: str) -> ValueOrder:
    """The order in which `name` quantises values."""
    return "columns" if name == hopper.NAME else "rows"


def backward_of(name: str) -> Callable[..., Grads]:
    """The backward of what `name` ran forward."""
    backward: Callable[..., Grads] = BACKENDS[name].backward
    return partial(backward, **LENT[name]) if name in LENT else backward


def prepare_backward_of(name: str) -> Callable[..., Callable[..., Grads] | None] | None:
    """The function of `name` that prepares a repeated backward; None for a backend without one."""
    prepare: Callable[..., Callable[..., Grads] | None] | None = getattr(BACKENDS[name], "prepare_backward", None)
    return partial(prepare, **LENT[name]) if prepare is not None and name in LENT else prepare


def _refusals(name: str, spec: Spec) -> tuple[str, ...]:
    return tuple(BACKENDS[name].refusals(spec))


DISPATCHER: Dispatcher[Spec] = Dispatcher(
    "run this attention problem",
    order=lambda spec: [backend.NAME for backend in ORDER],
    refusals=_refusals,
    describe=lambda spec: f"problem  {spec}",
)
verdicts, explain = DISPATCHER.verdicts, DISPATCHER.explain


def select(spec: Spec, backend: str | None = None) -> ModuleType:
    """Returns the backend that runs `spec`; see `Dispatcher.select`."""
    name = DISPATCHER.select(spec, backend)
    if backend is None and spec.device.startswith(("sm", "gfx")):
        warn_without_triton(is_gpu=True)
    return BACKENDS[name]


@cache
def choose(code: str, backend: str | None) -> str:
    """`select` by a spec's string, for the operators: the name of the backend that runs it."""
    return str(select(decode(code), backend).NAME)
