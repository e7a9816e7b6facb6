"""Layers whose weights are rounded in the forward. Their parameters are those that they had."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.nn import reading
from rooftile.qat.prepared.described import Preparation, described
from rooftile.qat.prepared.rounded import Rounded
from rooftile.qat.rounding import masking, steps
from rooftile.qat.sharded import is_sharded

_WRAPPED = (
    "{}.weight is computed from other parameters since the layer was prepared, as weight_norm and parametrisations do it, so its "
    "rounded numbers would be their beginning; restore the model first"
)


class Prepared(Rounded, nn.Module):
    """The parts that prepared layers share."""

    mask: Tensor

    @property
    def weight(self) -> Tensor:
        """The weight as others read it: rounded and masked when it is used, where the layer rounds (`reading`)."""
        # FSDP looks after its shards by this name
        return reading.read(self) if self.rounds and not is_sharded(self.parameter) else self.parameter

    @weight.setter
    def weight(self, x: Tensor) -> None:
        # wrappers such as spectral_norm and FSDP put tensors where the parameter was
        if "weight_g" in self._parameters:
            raise InvalidInput(_WRAPPED.format(self.qat.name))
        vars(self)["weight"] = x

    @property
    def parameter(self) -> Tensor:
        """The weight that is trained."""
        found = self._parameters.get("weight")
        if found is not None:
            return found
        put: Tensor | None = vars(self).get("weight")
        if put is None:
            raise InvalidInput(_WRAPPED.format(self.qat.name))
        return put

    @property
    def scales(self) -> Tensor | None:
        """The learned scales, a parameter named `weight_scale`, under the estimator "lsq" alone."""
        return self._parameters.get("weight_scale")

    @property
    def held_mask(self) -> Tensor | None:
        """The mask of a 2:4 weight."""
        return self._buffers.get("mask")

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

    stores_codes = True

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features), in the dtype of x, or in autocast's dtype."""
        if not self.rounds:
            return nn.functional.linear(x, self.parameter, self.bias)
        return self.rounded_product(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of the layer with another bias."""
        return self.rounded_product(x, bias)


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
    """Returns the weight of a layer as it is trained, which a prepared layer shows to no other caller."""
    found = layer._parameters.get("weight")
    return layer.weight if found is None else found  # type: ignore[return-value]
