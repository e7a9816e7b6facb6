"""The rows of a plan, in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

# the format of a layer that stays as it is: its own dtype
KEPT_NAMES = ("fp64", "fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A linear layer that belongs to an item: its name, and its weight (N, K)."""

    name: str
    N: int
    K: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Calls of an item with a number of rows.

    Args:
        phase: "step" of a module; "decode" or "prompt" of a decoder.
        rows: of one call.
        calls: in a step; of a decoder's phases times their shares of the steps.
    """

    phase: str
    rows: int
    calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An item in one format.

    Args:
        format: the word; the item's own dtype, such as "fp32", where it stays as it is.
        predicted_us: the time of all its calls in a step, by the ceilings.
        measured_us: the same, measured; None without.
        loss: what the model loses with this item alone rounded, 0 at least: see `Total.loss_kind`.
        nbytes: of the weights.
    """

    format: str
    predicted_us: float
    measured_us: float | None
    loss: float
    nbytes: int

    @property
    def us(self) -> float:
        """The time that the choice goes by: measured, else predicted."""
        return self.predicted_us if self.measured_us is None else self.measured_us


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """An item of the plan: linear layers that take one format together, because they read the same input.

    Args:
        name: of the item.
        parts: the layers.
        loads: their calls.
        flops, nbytes: of a step, in its own dtype; bytes through memory.
        ridge: FLOPs per byte where arithmetic begins to take longer than memory.
        bounds: "memory", "compute" or "overhead" for each load, in its own dtype.
        doubled: the time of twice the rows over the time of the rows, for each load; None where it was not measured.
        options: its formats; the first is its own dtype where that is among those asked for.
        why_not: the reasons of formats that it cannot have.
        chosen: the format.
        fuse_with: parts that one product can compute.
    """

    name: str
    parts: tuple[Part, ...]
    loads: tuple[Load, ...]
    flops: float
    nbytes: float
    ridge: float
    bounds: tuple[str, ...]
    doubled: tuple[float | None, ...]
    options: tuple[Option, ...]
    why_not: dict[str, str] = field(default_factory=dict)
    chosen: str = ""
    fuse_with: str = ""

    def __repr__(self) -> str:
        return f"Layer({self.name}: {self.chosen or 'not chosen'} of {', '.join(option.format for option in self.options)})"

    @property
    def operator(self) -> str:
        """Its operator."""
        return "linear"

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.nbytes if self.nbytes else 0.0

    @property
    def choice(self) -> Option:
        """The option that was chosen."""
        return next(option for option in self.options if option.format == self.chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """An operator that has no choice: a norm, a gate, rotary positions, softmax, attention, a loss, a convolution.

    Args:
        module, operator: its place and name.
        calls: in a step.
        flops, nbytes: of a step; None where no rule counts them.
        ridge: as in `PlannedLayer`.
        bound: "memory", "compute", "overhead", or "" where it was not counted.
        predicted_us: of a step.
        fuse_with: operators that can be in one kernel with it; saved_bytes, saved_us: what its part of that saves.
    """

    module: str
    operator: str
    calls: float
    flops: float | None
    nbytes: float | None
    ridge: float
    bound: str
    predicted_us: float | None
    fuse_with: str = ""
    saved_bytes: float = 0.0
    saved_us: float = 0.0

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte; None where they were not counted."""
        return None if self.flops is None or not self.nbytes else self.flops / self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """The whole step, as chosen and as it is ("kept").

    Args:
        predicted_us, kept_us: of layers and other operators, by the ceilings.
        layers_us, kept_layers_us: of the layers alone, by what the choice went by.
        measured_us, kept_measured_us: the whole run, measured; None without.
        nbytes, kept_nbytes: of the layers' weights.
        loss_kind: "nats" (or what the model's own loss is in) where there is data, else "relative error, no data".
        loss: the sum of the layers' losses.
        measured_loss: of the whole, with all layers in their formats; losses do not add exactly.
        base_loss: of the model as it is; None without data.
        max_loss: the largest sum that was allowed; None for any.
        single_us: layers_us if all layers that can had this one format.
    """

    predicted_us: float
    kept_us: float
    layers_us: float
    kept_layers_us: float
    measured_us: float | None
    kept_measured_us: float | None
    nbytes: int
    kept_nbytes: int
    loss_kind: str
    loss: float
    measured_loss: float
    base_loss: float | None
    max_loss: float | None
    single_us: dict[str, float]


class Whole(Protocol):
    """A plan, as far as the table and the page need it."""

    @property
    def model(self) -> str:
        """The class of the model, or the folder of its checkpoint."""

    @property
    def device(self) -> str:
        """The name of the device."""

    @property
    def ceilings(self) -> dict[str, Any]:
        """Its measured ceilings."""

    @property
    def layers(self) -> tuple[PlannedLayer, ...]:
        """The linear layers."""

    @property
    def others(self) -> tuple[Other, ...]:
        """All other operators."""

    @property
    def total(self) -> Total:
        """The whole step."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the reader."""
