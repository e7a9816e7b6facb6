"""Records that cross between the parts of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """Calls of one operator in one module and phase, with the same shapes, strides and dtypes: a row of the table."""

    module: str
    op: str
    phase: str  # "forward", "backward" or "optimiser"
    calls: int
    flops: int | None  # these three are for one call; None where no rule counts it
    special: int | None
    bytes: int | None
    where: str  # "file.py:123", the user's line; "" unknown
    dtype: str  # its matrix products' or its largest tensor's: "bf16", "fp32", ...
    device: str  # "cpu" or "cuda"
    key: tuple[object, ...]  # identifies the row in a second run
    indices: tuple[int, ...]  # positions in the step's sequence of calls

    @property
    def kind(self) -> tuple[object, ...]:
        """The operator with its shapes, strides and dtypes: rows of one kind, in several modules, take the same time alone."""
        return self.key[2:]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of its tensors, as a profiler names them: without shapes of single numbers."""
        return tuple(kind[0] for kind in self.key[4:] if isinstance(kind, tuple) and kind[0])


@dataclass(frozen=True, slots=True)
class Sample:
    """One recorded call with copies of its inputs: function(*args, **kwargs) runs it again."""

    operation: OperatorRow
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """One call of the step, in order: its row of the table, and the bytes that it reads and writes of each tensor.

    Tensors that share their storage have one name. Views are no calls.
    """

    row: int
    reads: Mapping[int, int]
    writes: Mapping[int, int]
    pointwise: bool  # a fused kernel can do it in its pass: also a reduction of rows, a copy
    ends: bool = False  # ... which ends with it: a reduction of all that it reads
    passes: int = 1  # that a fused kernel needs over what it reads
    draws: bool = False  # random numbers
    anew: bool = False  # a compiler's own kernel takes the place of a library's
    backward: bool = False  # a compiler makes a graph of its own for the backward
    again: bool = False  # a checkpoint runs it a second time, in the backward
