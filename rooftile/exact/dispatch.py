"""Chooses the backend for a problem, and explains why the others do not run it.

ORDER is a decision, fastest first, written where a reader sees it. A backend's `refusals` are pure, so choosing touches no
tensor, launches nothing and imports no kernel language; nothing here catches an exception. A backend that was named and
refuses is never replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.backends import eager, hopper, sdpa, tiled, triton
from rooftile.exact.spec import Grads, Spec, decode
from rooftile.numerics.precision import ValueOrder
from rooftile.runtime.explanation import Explanation

ORDER: tuple[ModuleType, ...] = (hopper, triton, sdpa, tiled, eager)
BACKENDS: dict[str, ModuleType] = {backend.NAME: backend for backend in ORDER}

# what one backend's backward has from another: `repair` computes the gradients again where a NaN spoiled what the mask should
# hide, and `bias_gradient` the gradient of a bias; `far_backward` computes gradients from the inputs alone, where
# scores share a large offset
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


def verdicts(spec: Spec) -> dict[str, tuple[str, ...]]:
    """Every backend's reasons against running `spec`, in ORDER; none for one that runs it."""
    return {name: tuple(backend.refusals(spec)) for name, backend in BACKENDS.items()}


def select(spec: Spec, backend: str | None = None) -> ModuleType:
    """The backend that runs `spec`: the named one, or the first of ORDER that does not refuse.

    Raises:
        InvalidInput: no backend has that name.
        Unsupported: the named backend refuses, or every one does; the message lists the reasons.
    """
    if backend is not None and backend not in BACKENDS:
        raise InvalidInput(f"backend is {backend!r}; has {', '.join(BACKENDS)}, or None for the fastest that runs")
    candidates = (BACKENDS[backend],) if backend is not None else ORDER
    for candidate in candidates:
        if next(candidate.refusals(spec), None) is None:
            return candidate
    raise Unsupported(_refusal(spec, backend))


@cache
def choose(code: str, backend: str | None) -> str:
    """`select` by a spec's string, for the operators: the name of the backend that runs it."""
    return str(select(decode(code), backend).NAME)


def explain(spec: Spec) -> Explanation:
    """The table that `rooftile.explain` prints: which backend runs `spec`, and why not each other."""
    reasons = verdicts(spec)
    chosen = next((name for name, against in reasons.items() if not against), None)
    lines = [f"problem  {spec}"]
    for name, against in reasons.items():
        if name == chosen:
            lines.append(f"{name:8} runs it")
        else:
            lines += _reasons(name, against) or [f"{name:8} could, but {chosen} comes first"]
    return Explanation("\n".join(lines), chosen, reasons.items())


def _refusal(spec: Spec, backend: str | None) -> str:
    reasons = verdicts(spec)
    if backend is not None:
        head = f"backend {backend!r} cannot run this attention problem"
        able = [name for name, against in reasons.items() if not against]
        tail = f"instead  {', '.join(able)} can; backend=None picks the fastest" if able else _nearest(reasons)
        listed = _reasons(backend, reasons[backend])
    else:
        head = "no backend can run this attention problem"
        tail = _nearest(reasons)
        listed = [line for name, against in reasons.items() for line in _reasons(name, against)]
    return "\n  ".join([head, f"problem  {spec}", *listed, tail])


def _reasons(name: str, against: tuple[str, ...]) -> list[str]:
    return [f"{name if n == 0 else '':8} - {reason}" for n, reason in enumerate(against)]


def _nearest(reasons: dict[str, tuple[str, ...]]) -> str:
    name = min(reasons, key=lambda name: len(reasons[name]))
    return f"nearest  {name}: {len(reasons[name])} thing(s) to change"
