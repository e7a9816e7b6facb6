"""A weight that is rounded and masked in the forward: its codes, its numbers, and its product."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, distributed

from rooftile.errors import InvalidInput
from rooftile.qat.prepared.described import Preparation
from rooftile.qat.rounding import masking, product
from rooftile.qat.rounding.codes import Taken, taken_from
from rooftile.qat.rounding.finite import flag_for
from rooftile.qat.rounding.numbers import numbers
from rooftile.qat.rounding.slow import warn_if_slow
from rooftile.qat.sharded import whole
from rooftile.runtime.launch import is_capturing
from rooftile.runtime.operators import autocast_on, transforms_active
from rooftile.weights import QuantisedWeight
from rooftile.weights.two_four.product import multiply_masked


class Rounded:
    """The parts that prepared layers and prepared tensors of other modules share."""

    qat: Preparation
    training: bool
    # whether a checkpoint has its codes; else it has the numbers that they stand for
    stores_codes: bool = False

    @property
    def parameter(self) -> Tensor:
        """The weight that is trained."""
        raise NotImplementedError

    @property
    def scales(self) -> Tensor | None:
        """The learned scales, under the estimator "lsq" alone."""
        return None

    @property
    def held_mask(self) -> Tensor | None:
        """The mask of a 2:4 weight."""
        return None

    def as_rows(self, weight: Tensor) -> Tensor:
        """Returns the weight as a product takes it: (N, K)."""
        return weight

    def as_stored(self, rows: Tensor) -> Tensor:
        """Undoes `as_rows`."""
        return rows

    def part(self, index: object) -> Tensor | None:
        """Returns the rounded numbers of weight[index] alone, which costs less than all of them; None where it does not."""
        return None

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Returns the layer's product with another bias; None if it has no product."""
        return None

    @property
    def rounds(self) -> bool:
        """Whether the forward rounds now."""
        return self.qat.started and not self.qat.ignored

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
        made = numbers(self.as_rows(kept), rounding, self.known_codes(), self.scales, self.training)
        return self.as_stored(made)

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
        weight = self.as_rows(whole(self.parameter))
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

    def rounded_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
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
                warn_if_slow(self.qat.rounding.format, x.device, self.qat.warning)
            taken = self.known_codes()
            # a copy with zeros in place would live until the backward
            if self._tells(taken):
                weight, mask = self.as_rows(whole(self.parameter)), self.held_mask
            else:
                weight, mask = self.as_rows(self.kept_weight(in_forward=True)), None
            return product.linear(x, weight, bias, self.qat.rounding, taken, self.scales, self.training, mask)

    def _tells(self, taken: Taken | None) -> bool:
        """Whether codes tell all that the gradients of a rounded weight need."""
        assert self.qat.rounding is not None, "a weight that is not rounded has no codes"
        return taken is not None and self.scales is None and (taken.inside is not None or not self.qat.rounding.clips)
