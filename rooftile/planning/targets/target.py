"""`Target`: the questions that the parts of a plan ask a model, be it a module with its inputs or a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from rooftile.planning.costs import DeviceCeilings
from rooftile.planning.records import Load, Other, Part

# rows of an item's input that are kept, for the error of its output
SAMPLE = 256


@dataclass(slots=True)
class Item:
    """Linear layers that take one format together.

    Args:
        name, parts, loads: as in `rooftile.planning.records.PlannedLayer`.
        products: (N, K) of each product: one of all parts, or one each.
        dtype: of the computation.
        weights: (N, K) of each product.
        biases: (N,) or None, of each product.
        sample: some rows of the input.
        takes_codes: whether the kernel before it writes FP8 or INT8 where it multiplies them, as norms and gates of a decoder do.
        trains: whether a step has its backward, too.
        needs_dx: whether that needs the gradient of its input.
        fixed: why it keeps its dtype whatever the formats; "" if it does not.
    """

    name: str
    parts: tuple[Part, ...]
    loads: tuple[Load, ...]
    dtype: torch.dtype
    weights: Callable[[], Sequence[Tensor]]
    biases: Sequence[Tensor | None]
    sample: Tensor
    fixed: str = ""
    takes_codes: bool = False
    trains: bool = False
    needs_dx: bool = False
    products: tuple[tuple[int, int], ...] = field(default=())

    def __post_init__(self) -> None:
        self.products = self.products or tuple((part.N, part.K) for part in self.parts)


class Target(Protocol):
    """A model to plan for."""

    name: str
    items: list[Item]

    @property
    def coverage(self) -> str:
        """Says in one line which share of the weights is planned, and what is left out."""

    def rounded(self, item: Item, word: str) -> AbstractContextManager[None]:
        """Within the block the model computes the item in a format."""

    def others(self, machine: DeviceCeilings) -> list[Other]:
        """Returns the operators that are no layers."""

    def step(self) -> list[tuple[float, Callable[[], Any]]]:
        """Returns what runs a step of each phase, in the order of the items' loads, with its share of the steps."""

    def output(self) -> Tensor:
        """Returns what the model computes, to be compared with and without rounding."""

    def loss(self, data: Any) -> Callable[[], float]:
        """Returns what computes the mean loss of the model on data."""
