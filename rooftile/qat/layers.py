"""Layers whose weights are rounded in the forward. Their parameters are those that they had."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rooftile.errors import InvalidInput
from rooftile.launch import is_capturing
from rooftile.matmul import QuantisedWeight
from rooftile.matmul.two_four import multiply_masked
from rooftile.operators import autocast_on, transforms_active
from rooftile.qat import masking, product, reading, steps
from rooftile.qat.codes import Taken, taken_from
from rooftile.qat.described import Preparation, described
from rooftile.qat.finite import flag_for
from rooftile.qat.numbers import numbers
from rooftile.qat.sharded import is_sharded, whole
from rooftile.qat.slow import tell


class Prepared(nn.Module):
    """The parts that prepared layers share."""

    mask: Tensor
    qat: Preparation

    @property
    def weight(self) -> Tensor:
        """The weight as others read it: rounded and masked when it is used, where the layer rounds (`reading`)."""
        # FSDP looks after its shards by this name
        return reading.read(self) if self.rounds and not is_sharded(self.parameter) else self.parameter

    @weight.setter
    def weight(self, x: Tensor) -> None:
        # wrappers such as weight_norm and FSDP put tensors where the parameter was
        vars(self)["weight"] = x

    @property
    def parameter(self) -> Tensor:
        """The weight that is trained."""
        found = self._parameters.get("weight")
        if found is not None:
            return found
        if "parametrizations" in self._modules:
            made: Tensor = self.parametrizations["weight"]()  # type: ignore[index, operator]
            return made
        put: Tensor = vars(self)["weight"]
        return put

    @property
    def rounds(self) -> bool:
        """Whether the forward rounds now."""
        return self.qat.started and not self.qat.ignored

    @property
    def scales(self) -> Tensor | None:
        """The learned scales, a parameter named `weight_scale`, under the estimator "lsq" alone."""
        return self._parameters.get("weight_scale")

    def trained(self) -> tuple[Tensor, Tensor | None]:
        """Returns the tensors that have a gradient: the parameter, and learned scales."""
        return self.parameter, self.scales

    def place(self) -> tuple[torch.Size, torch.dtype, torch.device]:
        """Returns shape, dtype and device of the weight."""
        return self.parameter.shape, self.parameter.dtype, self.parameter.device

    def parameter_to_change(self) -> Tensor:
        """Returns the parameter, for those who change `weight` in place."""
        return self.parameter

    def numbers(self) -> Tensor:
        """Returns the weight that the layer multiplies with, in its own dtype, with its gradient."""
        rounding = self.qat.rounding
        kept = self.kept_weight(in_forward=True)
        if rounding is None:
            return kept
        return numbers(kept, rounding, self.known_codes(), self.scales, self.training)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Returns the product of the layer with another bias; None if it has no product."""
        return None

    def kept_weight(self, *, in_forward: bool = False) -> Tensor:
        """Returns the whole weight as it is now, with zeros where a mask leaves it out; its gradient passes to all of it."""
        weight = whole(self.parameter)
        if self.qat.masking is None:
            return weight
        return masking.masked(weight, masking.kept(self, weight, in_forward=in_forward))

    def codes(self) -> QuantisedWeight:
        """Returns the codes of the weight as it is now.

        Raises:
            InvalidInput: the weight is not finite.
        """
        return self._taken(in_training=False, in_forward=False).codes

    def _taken(self, in_training: bool, in_forward: bool = True) -> Taken:
        """The codes of the weight as it is now; in training an error about it may come later (`finite`)."""
        name, rounding = self.qat.name, self.qat.rounding
        assert rounding is not None, "a weight that is not rounded has no codes"
        weight = whole(self.parameter)
        mask = None if self.qat.masking is None else masking.kept(self, weight, in_forward=in_forward)
        flag = flag_for(weight, in_training, self.qat.raised)
        try:
            return taken_from(weight, rounding, whole(self.scales), flag, mask)
        except InvalidInput as error:
            after = f" after {self.qat.steps} steps" if self.qat.steps else ""
            raise InvalidInput(f"{name}.weight{after} cannot be quantised to {rounding.format}: {error}") from None

    def check(self) -> None:
        """Raises the error of `codes` where the weight is not finite; waits for the device."""
        if self.qat.rounding is not None:
            self.codes()

    def known_codes(self) -> Taken | None:
        """Returns the codes for a forward; None where the product finds them itself.

        The micro-batches of a step share them. That is safe only where nothing but an optimiser, whose steps are counted, changes
        the weight between a forward and the next: not before its first step, since other optimisers write to `.data` and count
        none; not in evaluation or without gradients, where an average of weights may stand in for a while; not in a distributed
        run, where a sharded weight is filled anew.
        """
        if torch.compiler.is_compiling() or transforms_active():
            return None
        is_distributed = distributed.is_available() and distributed.is_initialized()
        # a captured graph is replayed for other weights
        captured = self.parameter.is_cuda and is_capturing()
        trains = self.training and torch.is_grad_enabled() and self.qat.steps > 0
        if not self.training:
            self.qat.kept = None
        if not trains or is_distributed or captured:
            return self._taken(self.training)
        now: tuple[int, ...] = (self.parameter.data_ptr(), self.parameter._version, self.qat.steps)
        if self.scales is not None:
            now = (*now, self.scales.data_ptr(), self.scales._version)
        if self.qat.kept is None or self.qat.kept[0] != now:
            self.qat.kept = now, self._taken(in_training=True)
        return self.qat.kept[1]

    def extra_repr(self) -> str:
        """Adds the format to what the layer says of itself."""
        return f"{super().extra_repr()}, {described(self.qat)}"

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.qat.masking is not None:
            # a compiled forward takes the mask that it finds
            masking.follow(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy counts the steps of its own optimiser
        super().__setstate__(state)
        steps.count(self)


class PreparedLinear(Prepared, nn.Linear):
    """A linear layer that multiplies with its rounded weight, as `rooftile.linear` does with the quantised one."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features), in the dtype of x, or in that of autocast."""
        if not self.rounds:
            return nn.functional.linear(x, self.parameter, self.bias)
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x times the rounded weight, plus a bias."""
        if self.qat.masking is not None:
            masking.check_trains(self)
        if not x.is_floating_point():
            raise InvalidInput(f"x is {x.dtype}; must be a tensor of bfloat16, float16, float32 or float64")
        kind = x.device.type
        if autocast_on() and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        # there is no autocast for the device "meta"
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            if self.qat.rounding is None:
                assert self.qat.masking is not None, "a prepared weight is rounded or masked"
                transposable = self.qat.masking.recipe.transposable
                kept = self.kept_weight(in_forward=True).to(x.dtype)
                return multiply_masked(x, kept, bias, transposable=transposable)
            if not torch.compiler.is_compiling():
                tell(self.qat.rounding.format, x.device, self.qat.told)
            taken = self.known_codes()
            # a copy with zeros in place would live until the backward
            if self._tells(taken):
                weight, mask = whole(self.parameter), self._buffers.get("mask")
            else:
                weight, mask = self.kept_weight(in_forward=True), None
            return product.linear(x, weight, bias, self.qat.rounding, taken, self.scales, self.training, mask)

    def _tells(self, taken: Taken | None) -> bool:
        """Whether codes tell all that the gradients of a rounded weight need."""
        assert self.qat.rounding is not None, "a weight that is not rounded has no codes"
        return taken is not None and self.scales is None and (taken.inside is not None or not self.qat.rounding.clips)


class PreparedEmbedding(Prepared, nn.Embedding):
    """An embedding of rounded rows."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens, integers of any shape, to (..., embedding_dim)."""
        numbers = self.numbers() if self.rounds else self.parameter
        return nn.functional.embedding(tokens, numbers, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)


# subclasses have a forward of their own, which would not round
PREPARED: dict[type[nn.Module], type[Prepared]] = {nn.Linear: PreparedLinear, nn.Embedding: PreparedEmbedding}


def prepare_layer(layer: nn.Module, preparation: Preparation, scales: nn.Parameter | None = None) -> None:
    """Makes a linear layer or an embedding round, with scales that are learned or with its own, and a linear layer 2:4."""
    layer.__class__ = PREPARED[type(layer)]
    assert isinstance(layer, Prepared)
    layer.qat = preparation
    if scales is not None:
        layer.register_parameter("weight_scale", scales)
    if preparation.masking is not None:
        masking.begin(layer, preparation.name)
    steps.count(layer)


def restore_layer(layer: Prepared) -> None:
    """Makes a prepared layer what it was.

    Raises:
        InvalidInput: something else has changed its class since.
    """
    plain = next((plain for plain, made in PREPARED.items() if type(layer) is made), None)
    if plain is None:
        raise InvalidInput(f"{layer.qat.name} is a {type(layer).__name__} since it was prepared; undo that first")
    if layer.qat.masking is not None:
        # a layer whose first mask was refused has none
        layer._buffers.pop("mask", None)
    del layer.qat
    layer._parameters.pop("weight_scale", None)
    layer.__class__ = plain  # type: ignore[assignment]


def parameter_of(layer: nn.Module) -> Tensor:
    """Returns the weight of a layer as it is trained, which a prepared one shows to nobody else."""
    return layer.parameter if isinstance(layer, Prepared) else layer.weight  # type: ignore[return-value]
