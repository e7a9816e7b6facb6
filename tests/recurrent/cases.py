"""Problems of every recurrence: tensors by name, in fp64, and the functions that take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rooftile import recurrent as rec
from tests.recurrent import definitions

D = torch.float64


@dataclass(frozen=True)
class Case:
    """A problem: positional tensors, tensors by keyword, and options; `state` is the keyword of the first state."""

    run: Callable[..., Any]
    defined: Callable[..., Any]
    tensors: Mapping[str, Tensor]
    given: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    state: str = "state"

    def defining(self, tensors: Mapping[str, Tensor], given: Mapping[str, Any]) -> Any:
        options = {{"softplus": "softplus_on"}.get(name, name): value for name, value in self.options.items()}
        return self.defined(*tensors.values(), **given, **options)


def front(batch: int, T: int, cu: Tensor | None) -> tuple[int, ...]:
    return (batch, T) if cu is None else (T,)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=D)


def ssd(
    T: int = 70, *, batch: int = 2, H: int = 4, P: int = 5, G: int = 2, N: int = 6, cu: Tensor | None = None, **options: Any
) -> Case:
    b, count = front(batch, T, cu), batch if cu is None else len(cu) - 1
    tensors = {
        "x": rand(*b, H, P), "dt": rand(*b, H), "A": -torch.rand(H, dtype=D) * 3 - 0.05, "B": rand(*b, G, N), "C": rand(*b, G, N),
    }  # fmt: skip
    given = {"D": rand(H), "z": rand(*b, H, P), "dt_bias": rand(H), "state": rand(count, H, P, N)}
    return Case(rec.ssd, definitions.ssd, tensors, given, {"cu": cu, **options})


def scan(T: int = 70, *, batch: int = 2, W: int = 7, N: int = 3, cu: Tensor | None = None, **options: Any) -> Case:
    b, count = front(batch, T, cu), batch if cu is None else len(cu) - 1
    tensors = {
        "x": rand(*b, W),
        "dt": rand(*b, W),
        "A": -torch.rand(W, N, dtype=D) * 3 - 0.05,
        "B": rand(*b, N),
        "C": rand(*b, N),
    }
    given = {"D": rand(W), "z": rand(*b, W), "dt_bias": rand(W), "state": rand(count, W, N)}
    return Case(rec.selective_scan, definitions.selective_scan, tensors, given, {"cu": cu, **options})


def conv(T: int = 70, *, batch: int = 2, W: int = 7, K: int = 4, cu: Tensor | None = None, **options: Any) -> Case:
    count = batch if cu is None else len(cu) - 1
    tensors = {"x": rand(*front(batch, T, cu), W), "weight": rand(W, K), "bias": rand(W)}
    return Case(rec.causal_conv, definitions.causal_conv, tensors, {"tail": rand(count, W, K - 1)}, {"cu": cu, **options}, "tail")


def delta(
    T: int = 70, *, batch: int = 2, Hk: int = 2, Hv: int = 4, Dk: int = 6, Dv: int = 5, channels: bool = False,
    cu: Tensor | None = None, **options: Any,
) -> Case:  # fmt: skip
    b, count = front(batch, T, cu), batch if cu is None else len(cu) - 1
    g = -torch.rand(*b, Hv, *((Dk,) if channels else ()), dtype=D)
    tensors = {"q": rand(*b, Hk, Dk), "k": rand(*b, Hk, Dk), "v": rand(*b, Hv, Dv), "g": g, "beta": torch.rand(*b, Hv, dtype=D)}
    return Case(rec.gated_delta, definitions.gated_delta, tensors, {"state": rand(count, Hv, Dk, Dv)}, {"cu": cu, **options})


KINDS: dict[str, Callable[..., Case]] = {
    "ssd": ssd, "scan": scan, "conv": conv, "delta": delta, "channels": lambda *a, **k: delta(*a, channels=True, **k),
}  # fmt: skip
