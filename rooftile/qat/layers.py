"""Layers whose weights are rounded in the forward. Their parameters are those that they had."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rooftile.errors import InvalidInput
from rooftile.matmul import QuantisedWeight
from rooftile.matmul.formats import ROW
from rooftile.operators import autocast_on, transforms_active
from rooftile.qat import product, steps
from rooftile.qat.product import Rounding
from rooftile.qat.sharded import whole


@dataclass(slots=True)
class Preparation:
    """The state of a prepared layer.

    Args:
        rounding: how the weight is rounded.
        name: of the layer in its model.
        start_step: from which step of the optimiser on it is rounded.
        steps: of the optimiser that holds the weight.
        ignored: how many `rooftile.qat.off` are open.
        kept: codes, with what tells whether they are still those of the weight.
        learns: whether an optimiser holds the scales of "lsq".
    """

    rounding: Rounding
    name: str
    start_step: int
    steps: int = 0
    ignored: int = 0
    kept: tuple[Any, QuantisedWeight] | None = None
    learns: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        return replace(self, kept=None, learns=False)

    def __reduce__(self) -> Any:
        return Preparation, (self.rounding, self.name, self.start_step, self.steps, self.ignored)


class Prepared(nn.Module):
    """The parts that prepared layers share."""

    weight: Tensor
    qat: Preparation

    @property
    def rounds(self) -> bool:
        """Whether the forward rounds now."""
        return not self.qat.ignored and self.qat.steps >= self.qat.start_step

    @property
    def scales(self) -> Tensor | None:
        """The learned scales, a parameter named `weight_scale`, under the estimator "lsq" alone."""
        return self._parameters.get("weight_scale")

    def codes(self) -> QuantisedWeight:
        """Returns the codes of the weight as it is now.

        Raises:
            InvalidInput: the weight is not finite.
        """
        name, rounding = self.qat.name, self.qat.rounding
        try:
            return product.codes_of(whole(self.weight), rounding, whole(self.scales))
        except InvalidInput as error:
            after = f" after {self.qat.steps} steps" if self.qat.steps else ""
            raise InvalidInput(f"{name}.weight{after} cannot be quantised to {rounding.format}: {error}") from None

    def known_codes(self) -> QuantisedWeight | None:
        """Returns the codes for a forward; None where the product finds them itself.

        The micro-batches of a step share them. That is safe only where nothing but an optimiser, whose steps are counted, changes
        the weight between a forward and the next: not before its first step; not without gradients, where an average of weights
        may stand in for a while; not in a distributed run, where a sharded weight is filled anew.
        """
        if torch.compiler.is_compiling() or transforms_active():
            return None
        is_distributed = distributed.is_available() and distributed.is_initialized()
        if not torch.is_grad_enabled() or not self.qat.steps or is_distributed:
            return self.codes()
        now: tuple[int, ...] = (self.weight.data_ptr(), self.weight._version, self.qat.steps)
        if self.scales is not None:
            now = (*now, self.scales.data_ptr(), self.scales._version)
        if self.qat.kept is None or self.qat.kept[0] != now:
            self.qat.kept = now, self.codes()
        return self.qat.kept[1]

    def extra_repr(self) -> str:
        """Adds the format to what the layer says of itself."""
        return f"{super().extra_repr()}, {described(self.qat.rounding)}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy counts the steps of its own optimiser
        super().__setstate__(state)
        steps.count(self)


class PreparedLinear(Prepared, nn.Linear):
    """A linear layer that multiplies with its rounded weight, as `rooftile.linear` does with the quantised one."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features), in the dtype of x, or in that of autocast."""
        if not self.rounds:
            return super().forward(x)
        kind = x.device.type
        if autocast_on() and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):
            return product.linear(x, self.weight, self.bias, self.qat.rounding, self.known_codes(), self.scales)


class PreparedEmbedding(Prepared, nn.Embedding):
    """An embedding of rounded rows."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens, integers of any shape, to (..., embedding_dim)."""
        if not self.rounds:
            return super().forward(tokens)
        numbers = product.numbers(self.weight, self.qat.rounding, self.known_codes(), self.scales)
        return nn.functional.embedding(tokens, numbers, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)


# subclasses have a forward of their own, which would not round
PREPARED: dict[type[nn.Module], type[Prepared]] = {nn.Linear: PreparedLinear, nn.Embedding: PreparedEmbedding}


def prepare_layer(layer: nn.Module, preparation: Preparation, scales: nn.Parameter | None = None) -> None:
    """Makes a linear layer or an embedding round, with scales that are learned or with its own."""
    layer.__class__ = PREPARED[type(layer)]
    assert isinstance(layer, Prepared)
    layer.qat = preparation
    if scales is not None:
        layer.register_parameter("weight_scale", scales)
    steps.count(layer)


def restore_layer(layer: Prepared) -> None:
    """Makes a prepared layer what it was.

    Raises:
        InvalidInput: something else has changed its class since.
    """
    plain = next((plain for plain, made in PREPARED.items() if type(layer) is made), None)
    if plain is None:
        raise InvalidInput(f"{layer.qat.name} is a {type(layer).__name__} since it was prepared; undo that first")
    del layer.qat
    layer._parameters.pop("weight_scale", None)
    layer.__class__ = plain  # type: ignore[assignment]


def described(rounding: Rounding) -> str:
    """Returns the format in words, such as "int4:32"."""
    group = "" if rounding.group is None else f":{'row' if rounding.group == ROW else rounding.group}"
    activations = "" if rounding.activations is None else f", activations in {rounding.activations}"
    return f"{rounding.format}{group}{activations}"
