"""A mode that sees every operator of a step, and knows in which module and phase it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass_type

from rooftile.diagnosis.counts import is_free
from rooftile.diagnosis.counts.traffic import is_plain, tensors
from rooftile.diagnosis.watching.compiled import GeneratedKernel, watched_kernels
from rooftile.diagnosis.watching.modules import Modules
from rooftile.runtime.operators import in_backward


class OptimiserSteps:
    """Knows whether an optimiser's step runs, while at least one block of `optimiser_steps` is open."""

    def __init__(self) -> None:
        self.running = 0
        self._open = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        self._open += 1
        if self._open == 1:
            self.running = 0
            self._hooks = [
                register_optimizer_step_pre_hook(lambda *unused: self._count(1)),
                register_optimizer_step_post_hook(lambda *unused: self._count(-1)),
            ]

    def __exit__(self, *unused: object) -> None:
        self._open -= 1
        if not self._open:
            for hook in self._hooks:
                hook.remove()

    def _count(self, change: int) -> None:
        self.running += change


# a step may begin and end within an optimiser's hook, where no hook can be added: who watches such steps opens it before
optimiser_steps = OptimiserSteps()


class Dispatched(TorchDispatchMode):
    """Calls `seen` for every operator that runs something, and for every kernel that torch.compile has generated.

    Code that was compiled before runs as it was compiled.
    """

    def __init__(self, seen: Callable[..., None]) -> None:
        super().__init__()
        self._seen = seen
        self._modules = Modules()
        self._kernels = ExitStack()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo gives up compiled code for good when it meets a mode that is not of this kind."""
        return True

    def __enter__(self) -> Any:
        optimiser_steps.__enter__()
        self._modules.__enter__()
        self._kernels.enter_context(watched_kernels(self._run_kernel))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._kernels.close()
        self._modules.__exit__(*error)
        optimiser_steps.__exit__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not in_backward():
            self._modules.note()
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if any(map(is_traceable_wrapper_subclass_type, types)):
            # a subclass that wraps other tensors, such as a jagged or a sharded tensor: its operators on these come next
            return NotImplemented
        self._note_arguments(args)
        # first of all: some of these only look like views, such as `to` and `reshape`, which may copy
        if _is_made_of_others(func) and all(map(is_plain, tensors((args, *kwargs.values())))):
            # in inference mode, and from a subclass, an operator made of others comes whole; the others have rules. Nested and
            # sparse tensors have kernels of their own for such operators
            TorchDispatchMode.__enter__(self)
            try:
                result = func.decompose(*args, **kwargs)
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
            if result is not NotImplemented:
                return result
        if is_free(func) or any(x.is_meta for x in tensors((args, *kwargs.values()))):
            return func(*args, **kwargs)
        before = self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        self._seen(func, args, kwargs, result, before)
        return result

    def _run_kernel(self, kernel: GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes():
            before = self._before(kernel, args, kwargs)
            result = kernel(*args, **kwargs)
            self._seen(kernel, args, kwargs, result, before)
        return result

    def _note_arguments(self, args: tuple[Any, ...]) -> None:
        """Looks at the arguments of every operator, also of one that runs nothing."""

    def _before(self, func: OpOverload | GeneratedKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Looks at the arguments before the operator changes them."""
        return None

    @property
    def phase(self) -> str:
        if optimiser_steps.running:
            return "optimiser"
        return "backward" if in_backward() else "forward"

    @property
    def module(self) -> str:
        """The innermost module that runs, or whose backward runs; "" outside of all."""
        # a checkpoint calls modules within the backward
        return self._modules.called if self._modules.called or not in_backward() else self._modules.of_backward


@cache
def _has_kernel(func: OpOverload) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in ("CPU", "CUDA"))


def _is_made_of_others(func: OpOverload) -> bool:
    """Whether an operator that came whole is to be taken apart: any in inference mode, else one without a kernel of its own."""
    if func.namespace != "aten" or not func._can_decompose():
        return False
    return torch.is_inference_mode_enabled() or not _has_kernel(func)
