"""`.weight` of a layer that rounds, as others read it: a tensor whose numbers are the rounded ones.

Some modules do not call their linear layers: they read `layer.weight`, and multiply themselves. So a prepared or converted layer
answers with a `ReadWeight`. It holds no numbers. Its dtype, shape and device cost nothing; any function that is called with it
gets the rounded numbers as they are then, whose gradient is the parameter's; and `functional.linear` becomes the layer's own
product, which rounds activations, too. PyTorch's fast paths of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention`, which
call no layer, are closed to tensors of other classes.

What is done to a weight in place is done to the parameter, as are `.data` and `.grad`: they are how others initialise, copy and
freeze it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from rooftile.runtime.operators import replaced, transforms_active


class Readable(Protocol):
    """A layer or a tensor that a `ReadWeight` stands for."""

    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the tensors that have a gradient: the parameter, and learned scales."""

    def place(self) -> tuple[torch.Size, torch.dtype, torch.device]:
        """Returns shape, dtype and device of the weight."""

    def numbers(self) -> Tensor:
        """Returns the rounded weight, with its gradient."""

    def part(self, index: object) -> Tensor | None:
        """Returns the rounded numbers of weight[index] alone; None where all of them are needed."""

    def parameter_to_change(self) -> Tensor:
        """Returns the tensor that an operation in place changes.

        Raises:
            InvalidInput: there is none.
        """

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Returns the layer's own product with this bias; None if it has no product."""


def read(owner: Readable) -> Tensor:
    """Returns the weight of `owner`, a `ReadWeight` where no caller needs a plain tensor."""
    # these know no other class of tensors
    if torch.compiler.is_compiling() or transforms_active() or replaced():
        return owner.numbers()
    trained = owner.trained()
    if not any(x is not None and x.requires_grad for x in trained):
        return ReadWeight(owner)
    found: Tensor = _Read.apply(*trained, owner)
    return found


class ReadWeight(Tensor):
    """A weight that is rounded when it is used."""

    owner: Readable
    held: Tensor | None

    @staticmethod
    def __new__(cls, owner: Readable) -> ReadWeight:
        """Makes one without numbers."""
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        shape, dtype, device = owner.place()
        made: ReadWeight = make(cls, shape, dtype=dtype, device=device)
        made.owner, made.held = owner, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        kwargs = dict(kwargs or {})
        if func in _PLACES:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is functional.linear:
            made = _product(*args, **kwargs)
            if made is not None:
                return made
        if func is Tensor.__getitem__ and isinstance(args[0], ReadWeight):
            made = args[0].owner.part(args[1])
            if made is not None:
                return made
        # orthogonal_ fills such a view
        if func is Tensor.view_as and isinstance(args[0], ReadWeight) and args[0].shape == args[1].shape:
            return args[0]
        if _changes(func):
            first, *rest = args or (kwargs.pop("tensor"),)
            args = (_changed(first), *rest)
        if "out" in kwargs:
            kwargs["out"] = tree_map_only(ReadWeight, _changed, kwargs["out"])
        return func(*_numbers(args), **_numbers(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # fmt: skip
        return func(*_numbers(args), **_numbers(kwargs or {}))


class _Read(torch.autograd.Function):
    """Connects a weight with its parameter for functions that PyTorch does not announce: torch.autograd.Function's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor | None, scales: Tensor | None, owner: Readable) -> ReadWeight:
        ctx.owner = owner
        return ReadWeight(owner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dw: Tensor) -> Any:
        with torch.enable_grad():
            numbers, trained = ctx.owner.numbers(), ctx.owner.trained()
        wanted = [x for x in trained if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(numbers, wanted, dw))
        return *(next(found) if x is not None and x.requires_grad else None for x in trained), None


def _product(input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not isinstance(weight, ReadWeight) or isinstance(input, ReadWeight) or isinstance(bias, ReadWeight):
        return None
    return weight.owner.multiply(input, bias)


def _numbers(x: Any) -> Any:
    return tree_map_only(ReadWeight, _numbers_of, x)


def _numbers_of(weight: ReadWeight) -> Tensor:
    found = weight.owner.numbers()
    # a kernel may have been given the address
    weight.held = found.detach()
    return found


def _changed(x: Any) -> Any:
    return x.owner.parameter_to_change() if isinstance(x, ReadWeight) else x


_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "xor", "or")
_IN_PLACE = frozenset(("__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS)))


def _getters(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(Tensor, name).__get__ for name in names)


# attributes that the parameter answers, not its rounded numbers
_OF_PARAMETER = frozenset(
    (
        *_getters("data", "grad", "requires_grad", "_version"), Tensor.register_hook, Tensor.register_post_accumulate_grad_hook,
        Tensor.retain_grad, Tensor.untyped_storage,
    )
)  # fmt: skip
# attributes that the parameter and its rounded numbers share
_PLACES = frozenset(
    (
        *_getters("dtype", "shape", "device", "ndim", "layout", "is_cuda", "is_meta", "is_nested", "is_sparse", "is_quantized"),
        *_getters("itemsize"), Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.is_floating_point,
        Tensor.is_complex, Tensor.element_size, Tensor.get_device, torch.is_floating_point, torch.is_complex, torch.numel,
    )
)  # fmt: skip


def _changes(func: Callable[..., Any]) -> bool:
    """Whether a function is about the parameter: it changes its first argument, or asks for what only a parameter has."""
    name = getattr(func, "__name__", "")
    return func in _OF_PARAMETER or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
