"""Weights of modules that multiply themselves: fused experts, `nn.MultiheadAttention`, and the Conv1D of Transformers' GPT-2.

Such a module gets a class of its own, whose weights are properties: who reads one finds it rounded (`reading`). The parameter
stays the same tensor under the same name. Weights alone are rounded, never activations, but for Conv1D, a plain product.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rooftile.errors import InvalidInput
from rooftile.nn import reading
from rooftile.qat.prepared.described import Preparation
from rooftile.qat.prepared.rounded import Rounded
from rooftile.qat.rounding import steps
from rooftile.qat.rounding.numbers import numbers
from rooftile.qat.sharded import is_sharded


class NamedWeight(NamedTuple):
    """A weight of a module that is prepared by its name.

    Args:
        module: which owns it.
        attribute: its name there.
        kind: what it is, in words.
        transposed: whether its last axis is the outputs'.
    """

    module: nn.Module
    attribute: str
    kind: str
    transposed: bool = False

    @property
    def weight(self) -> Tensor:
        """The parameter."""
        found = self.module._parameters[self.attribute]
        assert found is not None, "it was there when it was looked for"
        return found


EXPERTS, ATTENTION, CONV1D = "fused experts", "projections of nn.MultiheadAttention", "Conv1D"


def places_in(model: nn.Module) -> dict[str, NamedWeight]:
    """Returns the weights of a model that are prepared by their names."""
    return {name: place for prefix, module in model.named_modules() for name, place in _places_of(prefix, module)}


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is the Conv1D of Transformers' GPT-2, a linear layer with a weight (in, out)."""
    return type(module) is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())


def _places_of(prefix: str, module: nn.Module) -> Iterator[tuple[str, NamedWeight]]:
    held = {name: x for name, x in module._parameters.items() if x is not None}
    start = f"{prefix}." if prefix else ""
    if is_conv1d(module):
        yield prefix, NamedWeight(module, "weight", CONV1D, transposed=True)
    elif type(module) is NonDynamicallyQuantizableLinear:
        yield prefix, NamedWeight(module, "weight", ATTENTION)
    elif type(module) is nn.MultiheadAttention:
        names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
        yield from ((start + name, NamedWeight(module, name, ATTENTION)) for name in names if name in held)
    # what Transformers' decorator of classes of experts leaves in them
    elif {"has_gate", "is_transposed"} <= vars(module).keys():
        for name, x in held.items():
            if x.ndim == 3:
                yield start + name, NamedWeight(module, name, EXPERTS, transposed=bool(vars(module)["is_transposed"]))


class PreparedTensor(Rounded):
    """A weight of a module that reads it.

    Args:
        place: where it is.
        qat: its state.
    """

    def __init__(self, place: NamedWeight, qat: Preparation) -> None:
        self.module, self.attribute, self.kind, self.transposed = place
        self.qat = qat
        steps.count(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy counts the steps of its own optimiser
        vars(self).update(state)
        steps.count(self)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Whether its module is in training mode."""
        return self.module.training

    @property
    def parameter(self) -> Tensor:
        """The weight that is trained."""
        found = self.module._parameters.get(self.attribute)
        put: Tensor = vars(self.module)[self.attribute] if found is None else found
        return put

    @property
    def stays(self) -> bool:
        """Whether `convert` leaves the module, with a parameter of rounded numbers."""
        return self.kind != CONV1D

    def as_rows(self, weight: Tensor) -> Tensor:
        """Returns the weight as a product takes it: (N, K), all experts one after another."""
        return (weight.mT if self.transposed else weight).flatten(0, -2)

    def as_stored(self, rows: Tensor) -> Tensor:
        """Undoes `as_rows`."""
        shape = self.parameter.shape
        if not self.transposed:
            return rows.view(shape)
        return rows.view(*shape[:-2], shape[-1], shape[-2]).mT

    def part(self, index: object) -> Tensor | None:
        """Returns the rounded numbers of one expert; None where its scale depends on the others, or for another index."""
        rounding, weight = self.qat.rounding, self.parameter
        is_one = isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0 and index.dtype == torch.int64)
        if weight.ndim != 3 or not is_one or rounding is None or rounding.format == "nvfp4":
            return None
        one = weight[index]  # type: ignore[index]
        one = one.mT if self.transposed else one
        made = numbers(one.contiguous(), rounding, None, None, self.training)
        return made.mT if self.transposed else made

    def rounded_parameter(self) -> nn.Parameter:
        """Returns a parameter of the rounded numbers, for a module that stays."""
        made = self.codes().dequantise(self.parameter.dtype)
        return nn.Parameter(self.as_stored(made).contiguous(), requires_grad=False)


class PreparedModule(nn.Module):
    """Base class of modules with prepared weights."""

    qat_tensors: dict[str, PreparedTensor]
    qat_from: ClassVar[type[nn.Module]]
    qat_names: ClassVar[tuple[str, ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(max(int(protocol), 2))
        return _empty, (self.qat_from, self.qat_names), *made[2:]


def prepare_tensor(place: NamedWeight, preparation: Preparation) -> None:
    """Makes a module show a weight rounded."""
    module, kind = place.module, type(place.module)
    held: dict[str, PreparedTensor] = vars(module).get("qat_tensors", {})
    held[place.attribute] = PreparedTensor(place, preparation)
    vars(module)["qat_tensors"] = held
    base = kind.qat_from if issubclass(kind, PreparedModule) else kind
    # mypy takes classes of modules for values that have no hash
    module.__class__ = class_of(base, tuple(held))  # type: ignore[arg-type]


def restore_module(module: PreparedModule) -> None:
    """Makes a module what it was.

    Raises:
        InvalidInput: something else has changed its class since.
    """
    if type(module) is not class_of(module.qat_from, module.qat_names):  # type: ignore[arg-type]
        name = next(iter(module.qat_tensors.values())).qat.name
        raise InvalidInput(f"{name} is in a {type(module).__name__} since it was prepared; undo that first")
    for tensor in module.qat_tensors.values():
        del tensor.qat
    del module.qat_tensors
    module.__class__ = module.qat_from  # type: ignore[assignment]


@functools.cache
def class_of(base: type[nn.Module], names: tuple[str, ...]) -> type[PreparedModule]:
    """The class of modules of class `base` some of whose weights are prepared; it has the name of its base."""
    body: dict[str, Any] = {name: property(_reader(name), _writer(name)) for name in names}
    body |= {
        "__doc__": base.__doc__, "__module__": base.__module__, "__qualname__": base.__qualname__,
        "qat_from": base, "qat_names": names,
    }  # fmt: skip
    if base.__name__ == CONV1D:
        body["forward"] = _conv1d
    return type(base.__name__, (PreparedModule, base), body)


def _reader(name: str) -> Callable[[PreparedModule], Tensor]:
    def read(module: PreparedModule) -> Tensor:
        tensor = module.qat_tensors[name]
        return reading.read(tensor) if tensor.rounds and not is_sharded(tensor.parameter) else tensor.parameter

    return read


def _writer(name: str) -> Callable[[PreparedModule, Tensor], None]:
    def write(module: PreparedModule, x: Tensor) -> None:
        vars(module)[name] = x

    return write


def _conv1d(module: Any, x: Tensor) -> Tensor:
    tensor: PreparedTensor = module.qat_tensors["weight"]
    if tensor.rounds:
        return tensor.rounded_product(x, module.bias)
    made: Tensor = module.qat_from.forward(module, x)
    return made


def _empty(base: type[nn.Module], names: tuple[str, ...]) -> PreparedModule:
    made = class_of(base, names)  # type: ignore[arg-type]
    return made.__new__(made)
