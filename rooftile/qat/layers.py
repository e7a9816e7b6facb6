"""Layers whose weights are rounded in the forward. Their parameters are those that they had."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rooftile.errors import InvalidInput
from rooftile.launch import is_capturing
from rooftile.matmul import QuantisedWeight
from rooftile.matmul.formats import ROW
from rooftile.matmul.two_four import multiply_masked
from rooftile.operators import autocast_on, transforms_active
from rooftile.qat import masking, product, steps
from rooftile.qat.codes import Rounding, Taken, taken_from
from rooftile.qat.finite import Raised, flag_for
from rooftile.qat.masking import Masking
from rooftile.qat.sharded import whole
from rooftile.qat.slow import Told, tell


@dataclass(slots=True)
class Preparation:
    """The state of a prepared layer.

    Args:
        rounding: how the weight is rounded; None: it is not.
        name: of the layer in its model.
        start_step: from which step of the optimiser on it is rounded.
        steps: of the optimiser that holds the weight.
        ignored: how many `rooftile.qat.off` are open.
        kept: codes, with what tells whether they are still those of the weight.
        masking: of a 2:4 weight.
        told: what the layers of a model share of the warning about a device without units for their format.
        learns: whether an optimiser holds the scales of "lsq".
        raised: the flag of a weight that is not finite.
    """

    rounding: Rounding | None
    name: str
    start_step: int
    steps: int = 0
    ignored: int = 0
    kept: tuple[Any, Taken] | None = None
    masking: Masking | None = None
    told: Told = field(default_factory=Told)
    learns: bool = False
    raised: Raised = field(default_factory=Raised)
    # compiled code is compiled anew where a number that it reads changes, so it reads this
    started: bool = field(init=False)

    def __post_init__(self) -> None:
        self.reach(self.steps)

    def reach(self, steps: int) -> None:
        """Counts steps: there are so many now."""
        self.steps, self.started = steps, steps >= self.start_step

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        masking, told = self.masking and replace(self.masking, seen=None), deepcopy(self.told, memo)
        # a copy is made inside of `off` to be used outside of it
        return replace(self, ignored=0, kept=None, learns=False, raised=Raised(), masking=masking, told=told)

    def __reduce__(self) -> Any:
        masking = self.masking and replace(self.masking, seen=None)
        return Preparation, (self.rounding, self.name, self.start_step, self.steps, 0, None, masking, self.told)


class Prepared(nn.Module):
    """The parts that prepared layers share."""

    weight: Tensor
    mask: Tensor
    qat: Preparation

    @property
    def rounds(self) -> bool:
        """Whether the forward rounds now."""
        return self.qat.started and not self.qat.ignored

    @property
    def scales(self) -> Tensor | None:
        """The learned scales, a parameter named `weight_scale`, under the estimator "lsq" alone."""
        return self._parameters.get("weight_scale")

    def kept_weight(self, *, in_forward: bool = False) -> Tensor:
        """Returns the whole weight as it is now, with zeros where a mask leaves it out; its gradient passes to all of it."""
        weight = whole(self.weight)
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
        weight = whole(self.weight)
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
        captured = self.weight.is_cuda and is_capturing()
        trains = self.training and torch.is_grad_enabled() and self.qat.steps > 0
        if not self.training:
            self.qat.kept = None
        if not trains or is_distributed or captured:
            return self._taken(self.training)
        now: tuple[int, ...] = (self.weight.data_ptr(), self.weight._version, self.qat.steps)
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
            return super().forward(x)
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
                return multiply_masked(x, kept, self.bias, transposable=transposable)
            if not torch.compiler.is_compiling():
                tell(self.qat.rounding.format, x.device, self.qat.told)
            taken = self.known_codes()
            # a copy with zeros in place would live until the backward
            if self._tells(taken):
                weight, mask = whole(self.weight), self._buffers.get("mask")
            else:
                weight, mask = self.kept_weight(in_forward=True), None
            return product.linear(x, weight, self.bias, self.qat.rounding, taken, self.scales, self.training, mask)

    def _tells(self, taken: Taken | None) -> bool:
        """Whether codes tell all that the gradients of a rounded weight need."""
        assert self.qat.rounding is not None, "a weight that is not rounded has no codes"
        return taken is not None and self.scales is None and (taken.inside is not None or not self.qat.rounding.clips)


class PreparedEmbedding(Prepared, nn.Embedding):
    """An embedding of rounded rows."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens, integers of any shape, to (..., embedding_dim)."""
        if not self.rounds:
            return super().forward(tokens)
        assert self.qat.rounding is not None, "an embedding is prepared to be rounded"
        numbers = product.numbers(self.weight, self.qat.rounding, self.known_codes(), self.scales)
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


def described(preparation: Preparation) -> str:
    """Returns the format in words, such as "int4:32", "2:4", "int4:32 2:4" or "mxfp4 round_up, activations in mxfp4"."""
    rounding = preparation.rounding
    words = [] if rounding is None else [word_of(rounding)]
    if rounding is not None and rounding.rule != "floor":
        words.append(rounding.rule)
    words += ["2:4"] * (preparation.masking is not None)
    activations = "" if rounding is None or rounding.activations is None else f", activations in {rounding.activations}"
    return " ".join(words) + activations


def word_of(rounding: Rounding) -> str:
    """Returns a format with its group."""
    if rounding.group is None:
        return rounding.format
    return f"{rounding.format}:{'row' if rounding.group == ROW else rounding.group}"
