"""Leaves a program as it was before its step was run some hundred times."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def unchanged(held: Iterable[Any]) -> Iterator[None]:
    """Puts modules, optimisers and tensors back when the block ends, however it ends.

    Parameters, buffers, gradients, the training flags of modules, the state of optimisers, the streams of random numbers of
    PyTorch, NumPy and Python, the default dtype, the number of threads and the flags of `torch.backends`. A copy of all the
    tensors is held meanwhile, in the host's memory.
    """
    restores = [_random(), _flags()]
    for thing in held:
        if isinstance(thing, nn.Module):
            restores.append(_module(thing))
        elif isinstance(thing, Optimizer):
            restores.append(_optimiser(thing))
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
    """The modules, optimisers and tensors that a function or module works on: itself, its inputs, and what its code names."""
    found: list[Any] = [function, *inputs]
    owner = getattr(function, "__self__", None)
    if owner is not None:
        found += [owner, *vars(owner).values()] if hasattr(owner, "__dict__") else [owner]
    inner = getattr(function, "__func__", function)
    found += [cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_filled(cell)]
    code, names = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
    found += [names[name] for name in (code.co_names if code else ()) if name in names]
    held = [x for x in found if isinstance(x, nn.Module | Optimizer | Tensor)]
    return list({id(x): x for x in held}.values())


def _is_filled(cell: Any) -> bool:
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


_FLAGS: tuple[tuple[Any, str], ...] = (
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "enabled"),
)


def _flags() -> Callable[[], None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision, gradients = torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    kept = [(owner, name, getattr(owner, name)) for owner, name in _FLAGS]

    def restore() -> None:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_grad_enabled(gradients)
        for owner, name, value in kept:
            setattr(owner, name, value)

    return restore


def _copy(x: Tensor) -> Tensor:
    # a GPU's memory is the program's
    return x.detach().to("cpu", copy=True)


def _tensor(x: Tensor) -> Callable[[], None]:
    kept = _copy(x)

    def restore() -> None:
        with torch.no_grad():
            x.copy_(kept)

    return restore


def _leaf(x: Tensor) -> Callable[[], None]:
    kept = _copy(x)
    gradient = x.grad if x.is_leaf else None
    values = None if gradient is None else _copy(gradient)

    def restore() -> None:
        with torch.no_grad():
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
