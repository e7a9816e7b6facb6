"""Records one run of a module: the calls of its linear layers, and all operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rooftile.diagnosis.watching.watch import Watch
from rooftile.planning.targets.target import SAMPLE


class Recording:
    """Watches one run of a model whose linear layers have these names."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        self._layers, self._hooks = layers, list[Any]()
        self._inside = 0
        self.watch = _Operators(lambda: self._inside > 0)
        self.calls: dict[str, Calls] = {}

    @property
    def in_layers(self) -> set[int]:
        """The numbers of the calls of operators that are in a linear layer."""
        return self.watch.in_layers

    def __enter__(self) -> None:
        for name, layer in self._layers.items():
            self._hooks.append(layer.register_forward_pre_hook(self._begin_of(name), with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(self._end, always_call=True))
        self.watch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.watch.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def groups(self) -> list[list[str]]:
        """Returns the names of layers that read one input in one parent, as q, k and v do; in the order of their calls."""
        found: list[list[str]] = []
        for name in self.calls:
            home = next((group for group in reversed(found) if self._go_together(group[0], name)), None)
            if home is None:
                found.append([name])
            else:
                home.append(name)
        return found

    def _go_together(self, one: str, other: str) -> bool:
        a, b = self.calls[one], self.calls[other]
        same_parent = one.rpartition(".")[0] == other.rpartition(".")[0] and "." in one
        return same_parent and a.number == b.number and a.rows == b.rows and a.dtype == b.dtype

    def _begin_of(self, name: str) -> Callable[..., None]:
        def begin(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # operations of the hook itself are no part of the model
            with _disable_current_modes():
                self._note(name, args[0] if args else next(iter(kwargs.values())))
            self._inside += 1

        return begin

    def _end(self, *unused: Any) -> None:
        self._inside -= 1

    def _note(self, name: str, x: Tensor) -> None:
        if name not in self.calls:
            # the tensor itself is compared: another one may get its address when it is gone
            same = [call.number for call in self.calls.values() if call.first() is x]
            number = same[-1] if same else len(self.calls)
            sample = x.detach().reshape(-1, x.shape[-1])[:SAMPLE].clone()
            self.calls[name] = Calls(number, ref(x), sample, computed_in(x), x.requires_grad)
        call, rows = self.calls[name], x.numel() // x.shape[-1]
        call.rows[rows] = call.rows.get(rows, 0) + 1


class Calls:
    """The calls of one layer.

    Args:
        number: of its first input; layers that read the same tensor have the same.
        first: that input.
        sample: some rows of it.
        dtype: of the computation.
        needs_dx: whether the input has a gradient.
    """

    def __init__(
        self, number: int, first: Callable[[], Tensor | None], sample: Tensor, dtype: torch.dtype, needs_dx: bool
    ) -> None:  # fmt: skip
        self.number, self.sample, self.dtype, self.needs_dx = number, sample.to(dtype), dtype, needs_dx
        self.first = first
        self.rows: dict[int, int] = {}


class _Operators(Watch):
    """A watch that knows which calls are in a linear layer."""

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        super().__init__()
        self._is_inside = is_inside
        self.in_layers: set[int] = set()
        self._modules_of_layers: set[str] = set()

    def _note(self, *call: Any) -> None:
        number = len(self.calls)
        super()._note(*call)
        if self._is_inside():
            self._modules_of_layers.add(self.module)
        # the backward of a layer calls no module
        if self._is_inside() or (self.phase == "backward" and self.module in self._modules_of_layers):
            self.in_layers.add(number)


def computed_in(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a linear layer computes x now."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else x.dtype
