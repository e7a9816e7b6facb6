"""The torch operators of this package (`torch.ops.rooftile`): how one is defined, and when a call goes through it.

An operator is what the rest of PyTorch sees of a kernel: `torch.compile`, a `TorchDispatchMode`, the profiler. A trip through
PyTorch's dispatcher costs several microseconds of the host's time, so a call that is not watched runs the operator's function
directly. Private names of PyTorch's dispatcher are used in this file alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch import pyfunctorch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from rooftile.errors import Unsupported

_LIBRARY = torch.library.Library("rooftile", "DEF")

# a context in which an operator is called without its gradient rule
below_autograd = torch._C._AutoDispatchBelowAutograd


class above_autograd:
    """A context in which plain tensors record gradients again, within an operator's function, which runs below autograd."""

    def __enter__(self) -> None:
        excluded = torch._C._dispatch_tls_local_exclude_set()
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            excluded = excluded.remove(key)
        self._guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
        self._guard.__enter__()
        self._recording = torch.enable_grad()
        self._recording.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._recording.__exit__(*error)
        self._guard.__exit__(*error)


# every operator by its name, in the order of definition
DEFINED: dict[str, OpOverload] = {}

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype))


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], gradient: Callable[..., Any] | None = None,
    has_gradient: tuple[int, ...] = (),
) -> OpOverload:  # fmt: skip
    """Defines `rooftile::name` and returns it.

    Args:
        schema: name, arguments and results in PyTorch's notation; `Tensor(a!)` is an argument that is written to.
        run: computes the results, on any device, without recording gradients.
        fake: returns results of the right shapes, dtypes and devices, with nothing in them.
        gradient: runs the operator where a gradient may be asked for. Without it, such a call raises `Unsupported`.
        has_gradient: the places of the arguments that have one. With it, `gradient` is an autograd function's `apply`, which runs
            where one of them requires a gradient; elsewhere the operator runs below autograd.

    Example:
        >>> twice = define("twice(Tensor x) -> Tensor", lambda x: 2 * x, torch.empty_like)
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator: OpOverload = getattr(torch.ops.rooftile, name).default
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    if gradient is None:
        gradient = _refusal_of_gradients(name, operator)
    elif has_gradient:
        gradient = _where_wanted(gradient, has_gradient, operator)
    _LIBRARY.impl(name, gradient, "Autograd")
    torch.library.register_fake(f"rooftile::{name}", fake, lib=_LIBRARY)
    DEFINED[name] = operator
    return operator


def call(operator: OpOverload, run: Callable[..., Any], *arguments: Any) -> Any:
    """The operator where a compiler, mode or profiler watches, else `run`; the results carry no gradient."""
    if torch.compiler.is_compiling() or watched(*arguments):
        with torch.no_grad():
            return operator(*arguments)
    return run(*arguments)


# whether autocast is on for any device
autocast_on = torch._C._is_any_autocast_enabled

# looked up once: these are asked at every call
_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_profiler_on = torch.autograd._profiler_enabled
_jit_trace = torch._C._get_tracing_state


def watched(*arguments: Any) -> bool:
    """Whether something has to see the operator: a mode, a transform, a tensor subclass, the profiler, torch.jit.trace."""
    return replaced(*arguments) or _profiler_on() or _jit_trace() is not None


def replaced(*arguments: Any) -> bool:
    """Whether tensors may stand for others, so that no kernel can have them: a mode, a transform, a tensor subclass."""
    for x in arguments:
        if type(x) not in _PLAIN:
            return True
    return _modes() > 0 or _transform() is not None


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vjp, jvp, vmap, ...) is active, outside of torch.compile."""
    return not torch.compiler.is_compiling() and _transform() is not None


# a context in which tensors are plain ones, whatever transforms of torch.func are active
outside_transforms = pyfunctorch.temporarily_clear_interpreter_stack

# the same inside torch.compile too, which knows this function
transforms_active = torch._C._are_functorch_transforms_active


def only_grad_and_vmap() -> bool:
    """Whether all active transforms of torch.func are `grad` (which `vjp` and `jacrev` use) and `vmap`."""
    kinds = torch._C._functorch.TransformType
    return all(layer.key() in (kinds.Grad, kinds.Vmap) for layer in torch._C._functorch.get_interpreter_stack() or ())


def levels_of_gradients(*tensors: Tensor | None) -> set[int]:
    """The levels that record a gradient of one of these: 0 is autograd's own, and each `grad` of torch.func has one."""
    functorch = torch._C._functorch
    layers = [x for x in functorch.get_interpreter_stack() or () if x.key() == functorch.TransformType.Grad]
    recording = functorch.CGradInterpreterPtr(layers[0]).prevGradMode() if layers else torch.is_grad_enabled()
    levels = set()
    for x in tensors:
        while x is not None and functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_gradtrackingtensor(x) and x.requires_grad:
                levels.add(functorch.maybe_get_level(x))
            x = functorch.get_unwrapped(x)
        if x is not None and x.requires_grad and recording:
            levels.add(0)
    return levels


def mapped(*tensors: Tensor | None) -> bool:
    """Whether `torch.vmap` maps an axis of one of these."""
    functorch = torch._C._functorch
    for x in tensors:
        while x is not None and functorch.is_functorch_wrapped_tensor(x):
            if functorch.is_batchedtensor(x):
                return True
            x = functorch.get_unwrapped(x)
    return False


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd is recording, and one of these requires a gradient; for tensors outside of transforms."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def in_backward() -> bool:
    """Whether this thread runs a backward, in which a checkpoint runs its forward again."""
    current: Any = torch._C._current_graph_task_id
    return bool(current() != -1)


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether something records or replaces the operations on these: a compiler, mode, transform, trace, or a derivative.

    Then they have to be PyTorch's own where no operator stands for them. The profiler sees kernels, too.
    """
    if torch.compiler.is_compiling() or replaced(*tensors) or _jit_trace() is not None:
        return True
    return wants_grad(*tensors) or forward_ad._current_level >= 0


def in_forward_mode() -> bool:
    """Whether tangents are computed, outside of torch.compile."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def needs_steps(*tensors: Tensor | None) -> bool:
    """Whether a derivative or a transform needs the plain operations of a function on these, because no operator has it."""
    if torch.compiler.is_compiling():
        return transforms_active() or wants_grad(*tensors)
    return wants_grad(*tensors) or _transform() is not None or forward_ad._current_level >= 0


def _where_wanted(gradient: Callable[..., Any], has_gradient: tuple[int, ...], operator: OpOverload) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        if wants_grad(*(arguments[n] for n in has_gradient)):
            return gradient(*arguments)
        with below_autograd():
            return operator(*arguments)

    return run


def _refusal_of_gradients(name: str, operator: OpOverload) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        tensors = [x for part in arguments for x in (part if isinstance(part, list) else (part,)) if isinstance(x, Tensor)]
        if wants_grad(*tensors):
            raise Unsupported(
                f"rooftile::{name} has no gradient, and an input requires one: call it under torch.no_grad(), "
                "or give it inputs without requires_grad"
            )
        with below_autograd():
            return operator(*arguments)

    return run
