"""Knows which module of a model runs, in the forward and in the backward.

An operator of the forward belongs to the innermost module that is being called. An operator of the backward belongs to the
module whose operator made the autograd node that runs: nodes are numbered as they are made.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rooftile.diagnosis.watching.unseen import pass_over

# the number of nodes that the forward did not make, such as the accumulation of a gradient
UNNUMBERED = 2**63


class Modules:
    """Follows the modules that are called inside its block."""

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._running: list[str] = []
        self._nodes: list[int] = []
        self._modules: list[str] = []
        self._last = ""
        self._hooks: list[Any] = []
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> Modules:
        self._warnings.__enter__()
        # torch.compile's wrapper says that hooks of all modules see the module twice
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(self._end)

        # a compiler may be at work around a call: what it makes of these is no part of the program
        def before(module: nn.Module, unused: Any) -> None:
            if not torch.compiler.is_compiling():
                begin(module)

        def after(*unused: Any) -> None:
            if not torch.compiler.is_compiling():
                end()

        pass_over(before, after)
        self._hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
        return self

    def __exit__(self, *unused: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._warnings.__exit__(None, None, None)

    def note(self) -> None:
        """Remembers for which module autograd made its newest node; called within each operator of the forward."""
        node = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        if not self._nodes or node > self._nodes[-1]:
            self._nodes.append(node)
            self._modules.append(self.called)

    @property
    def called(self) -> str:
        """The innermost module that is being called; "" outside of all."""
        return self._running[-1] if self._running else ""

    @property
    def of_backward(self) -> str:
        """The module whose backward runs."""
        node = torch._C._current_autograd_node()
        number = UNNUMBERED if node is None else node._sequence_nr()
        if number < UNNUMBERED and self._nodes:
            # views make nodes too, and need not have been noted
            self._last = self._modules[max(0, bisect_right(self._nodes, number) - 1)]
        return self._last

    def _begin(self, module: nn.Module) -> None:
        if module not in self._names:
            self._name(module, type(module).__name__)
        self._running.append(self._names[module])

    def _end(self) -> None:
        if self._running:
            self._running.pop()

    def _name(self, module: nn.Module, name: str) -> None:
        """Names a module and its parts; layers of one kind share a name, such as "Llama.layers.*.mlp"."""
        if module in self._names:
            return
        # torch.compile's wrapper has the module inside
        name = name.removeprefix("OptimizedModule._orig_mod.")
        self._names[module] = name
        parts = list(module.named_children())
        alike = len(parts) > 1 and len({type(part) for _, part in parts}) == 1
        for word, part in parts:
            self._name(part, f"{name}.{'*' if alike and word.isdecimal() else word}")
