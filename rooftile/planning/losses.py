"""Measures what a model loses by a layer in a format: on data, or without data by the error of the layer's output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from rooftile.errors import InvalidInput
from rooftile.planning.formats import KEPT
from rooftile.planning.targets.outputs import relative_error
from rooftile.planning.targets.target import Item, Target
from rooftile.planning.timing import products_of

# a change of the loss by less, as a share of it, is rounding of its mean
NOTHING = 1e-6


class Judge(Protocol):
    """Measures losses in one way."""

    @property
    def kind(self) -> str:
        """The unit of losses, for the reader."""

    @property
    def base(self) -> float | None:
        """The loss of the model as it is; None without data."""

    def alone(self, item: Item, word: str) -> float:
        """Returns what the model loses with one item in a format, 0 at least."""

    def together(self, chosen: Mapping[str, str]) -> float:
        """Returns what it loses with all items in formats, by their names."""


class ByData:
    """The mean loss on data with rounding, less that without."""

    kind = "nats"

    def __init__(self, target: Target, data: Any) -> None:
        self._target, self._loss = target, target.loss(data)
        self.base: float | None = self._finite()

    def alone(self, item: Item, word: str) -> float:
        """One run over the data. A loss that falls by chance counts as none: it could buy losses elsewhere."""
        assert self.base is not None
        with self._target.rounded(item, word):
            lost = self._finite() - self.base
        return lost if lost > NOTHING * abs(self.base) else 0.0

    def together(self, chosen: Mapping[str, str]) -> float:
        """One run over the data, with its sign."""
        assert self.base is not None
        with all_rounded(self._target, chosen):
            return self._finite() - self.base

    def _finite(self) -> float:
        loss = self._loss()
        if not math.isfinite(loss):
            raise InvalidInput(f"the loss on data is {loss}; must be finite: look at the data and the model")
        return loss


class ByError:
    """Measures the relative error of a layer's output for some rows of its input; for a plan, of the model's output."""

    kind = "relative error, no data"
    base = None

    def __init__(self, target: Target) -> None:
        self._target = target

    def alone(self, item: Item, word: str) -> float:
        """Two products."""
        with torch.no_grad(), torch.autocast(item.sample.device.type, enabled=False):
            exact, rounded = (torch.cat(products_of(item, one)(item.sample), dim=1) for one in (KEPT, word))
        return self._known(relative_error(rounded, exact))

    def together(self, chosen: Mapping[str, str]) -> float:
        """Two runs of the model."""
        exact = self._target.output()
        with all_rounded(self._target, chosen):
            return self._known(relative_error(self._target.output(), exact))

    @staticmethod
    def _known(error: float) -> float:
        if not math.isfinite(error):
            raise InvalidInput("the model's numbers are not finite for these inputs; look at both")
        return error


def all_rounded(target: Target, chosen: Mapping[str, str]) -> ExitStack:
    """Returns a block in which items are in formats, by their names."""
    stack = ExitStack()
    for item in target.items:
        if chosen[item.name] != KEPT:
            stack.enter_context(target.rounded(item, chosen[item.name]))
    return stack
