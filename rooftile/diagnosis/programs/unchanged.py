"""Leaves a program as it was before its step was run some hundred times."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# objects of these types are put back as a whole
KEPT = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, torch.Generator)
# values of these types hold no state
PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# the search leaves out objects and functions of these packages: a data loader would lead to all of its data
LIBRARIES = frozenset({"torch", "numpy", "transformers", "builtins", "rooftile", *sys.stdlib_module_names})
# objects inside of objects that are searched
DEEPEST = 6


@contextmanager
def unchanged(held: Iterable[Any]) -> Iterator[None]:
    """Puts modules, optimisers and tensors back when the block ends, however it ends.

    Parameters, buffers, gradients, the training flags of modules, the state of optimisers, their schedules and scalers, the
    streams of random numbers of PyTorch, NumPy and Python, the default dtype, the number of threads, autocast and the flags of
    `torch.backends`. A copy of all the tensors is held meanwhile, in the host's memory.
    """
    restores = [_random(), _flags()]
    for thing in held:
        if isinstance(thing, nn.Module):
            restores.append(_module(thing))
        elif isinstance(thing, Optimizer):
            restores.append(_optimiser(thing))
        elif isinstance(thing, LRScheduler | torch.amp.GradScaler):
            restores.append(_loaded(thing))
        elif isinstance(thing, torch.Generator):
            restores.append(_generator(thing))
        elif isinstance(thing, Tensor) and not thing.requires_grad:
            restores.append(_tensor(thing))
        elif isinstance(thing, Tensor):
            restores.append(_leaf(thing))
    try:
        yield
    finally:
        for restore in reversed(restores):
            restore()


def state_of(function: Any, inputs: Iterable[Any]) -> list[Any]:
    """Finds what a function or module works on: modules, optimisers, schedules, scalers, generators and tensors.

    They are itself, its inputs, and the names in its code and in the user's functions that it calls; also inside of lists,
    dictionaries, partial functions and objects. Tensors of a data set count only where they are inputs or have a name.
    """
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}

    def visit(x: Any, depth: int, *, named: bool) -> None:
        if depth > DEEPEST or id(x) in seen or isinstance(x, PLAIN):
            return
        # an object that this dictionary holds cannot give its id to another
        seen[id(x)] = x
        if isinstance(x, KEPT) or (isinstance(x, Tensor) and named):
            found[id(x)] = x
        elif not isinstance(x, Tensor | ModuleType):
            parts, are_named = _parts(x)
            for part in parts:
                visit(part, depth + 1, named=are_named or (named and isinstance(x, list | tuple | dict)))

    visit(function, 0, named=True)
    for one in inputs:
        visit(one, 0, named=True)
    return list(found.values())


def _parts(x: Any) -> tuple[list[Any], bool]:
    """Lists what an object holds, and says whether code names each of its tensors."""
    if isinstance(x, partial):
        return [x.func, *x.args, *x.keywords.values()], True
    if isinstance(x, MethodType):
        return [x.__self__, x.__func__], True
    if isinstance(x, FunctionType):
        if x.__module__.partition(".")[0] in LIBRARIES:
            return [], False
        cells = [cell.cell_contents for cell in x.__closure__ or () if is_filled(cell)]
        return [*cells, *(x.__globals__[name] for name in _names(x.__code__) if name in x.__globals__)], True
    if isinstance(x, dict):
        return list(x.values()), False
    if isinstance(x, list | tuple | set):
        return list(x), False
    kind = x if isinstance(x, type) else type(x)
    if kind.__module__.partition(".")[0] in LIBRARIES:
        return [], False
    methods = [thing for thing in vars(kind).values() if isinstance(thing, FunctionType)]
    return [*methods, *([] if kind is x else getattr(x, "__dict__", {}).values())], False


def _names(code: CodeType) -> list[str]:
    """The names that some code and the functions defined in it refer to."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def is_filled(cell: Any) -> bool:
    """Returns whether a closure's cell holds something yet."""
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def _random() -> Callable[[], None]:
    numpy = sys.modules.get("numpy")
    numbers = random.getstate(), numpy.random.get_state() if numpy else None
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []

    def restore() -> None:
        random.setstate(numbers[0])
        if numpy:
            numpy.random.set_state(numbers[1])
        torch.set_rng_state(on_cpu)
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)

    return restore


# a program may set these attributes
_FLAGS: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
)
# getters and setters of others
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)),
)


def _flags() -> Callable[[], None]:
    flags = [(owner, name, getattr(owner, name)) for owner, name in _FLAGS]
    settings = [(get, put, get()) for get, put in _SETTINGS]
    restore_products = _precision_of_products()

    def restore() -> None:
        for owner, name, value in flags:
            setattr(owner, name, value)
        for get, put, value in settings:
            if get() != value:
                put(value)
        restore_products()

    return restore


def _precision_of_products() -> Callable[[], None]:
    """PyTorch has two ways to say it. Once a program has used the newer one, the older cannot be read any more."""
    try:
        kept = torch.get_float32_matmul_precision()
    except RuntimeError:
        cudnn = torch.backends.cudnn
        owners = [torch.backends, torch.backends.cuda.matmul, cudnn, *(getattr(cudnn, kind) for kind in ("conv", "rnn"))]
        values = [(owner, owner.fp32_precision) for owner in owners]

        def restore() -> None:
            for owner, value in values:
                if owner.fp32_precision != value:
                    owner.fp32_precision = value

        return restore

    def restore_older() -> None:
        torch.set_float32_matmul_precision(kept)

    return restore_older


def _copy(x: Tensor) -> Tensor:
    # a GPU's memory is the program's
    return x.detach().to("cpu", copy=True)


def _tensor(x: Tensor) -> Callable[[], None]:
    kept = _copy(x)

    def restore() -> None:
        # outside of it nothing can be written that was made in inference mode
        with torch.inference_mode(x.is_inference()), torch.no_grad():
            x.copy_(kept)

    return restore


def _leaf(x: Tensor) -> Callable[[], None]:
    kept = _copy(x)
    gradient = x.grad if x.is_leaf else None
    values = None if gradient is None else _copy(gradient)

    def restore() -> None:
        with torch.inference_mode(x.is_inference()), torch.no_grad():
            x.copy_(kept)
            if gradient is not None and values is not None:
                gradient.copy_(values)
        if x.is_leaf:
            x.grad = gradient

    return restore


def _module(module: nn.Module) -> Callable[[], None]:
    training = [(part, part.training) for part in module.modules()]
    restores = [_leaf(p) for p in module.parameters()] + [_tensor(b) for b in module.buffers()]

    def restore() -> None:
        for part, flag in training:
            part.training = flag
        for put_back in restores:
            put_back()

    return restore


def _optimiser(optimiser: Optimizer) -> Callable[[], None]:
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    restores = [_leaf(p) for p in parameters]
    state = {p: _state(values) for p, values in optimiser.state.items()}
    groups = [{k: deepcopy(v) for k, v in group.items() if k != "params"} for group in optimiser.param_groups]

    def restore() -> None:
        for put_back in restores:
            put_back()
        optimiser.state.clear()
        optimiser.state.update({p: {name: put_back() for name, put_back in values.items()} for p, values in state.items()})
        for group, kept in zip(optimiser.param_groups, groups, strict=True):
            group.update(kept)

    return restore


def _loaded(thing: Any) -> Callable[[], None]:
    """A schedule of the learning rate, or a scaler of gradients."""
    kept = deepcopy(thing.state_dict())
    return lambda: thing.load_state_dict(deepcopy(kept))


def _generator(thing: torch.Generator) -> Callable[[], None]:
    kept = thing.get_state()

    def restore() -> None:
        thing.set_state(kept)

    return restore


def _state(values: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Returns a function for each entry of a parameter's state that gives it back: the same tensor with its values, or a copy."""
    return {name: _entry(value) for name, value in values.items()}


def _entry(value: Any) -> Callable[[], Any]:
    if not isinstance(value, Tensor):
        kept = deepcopy(value)
        return lambda: kept
    restore = _tensor(value)

    def put_back() -> Tensor:
        restore()
        return value

    return put_back
