"""Records that cross between the parts of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
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


@dataclass(frozen=True, slots=True)
class Sample:
    """One recorded call with copies of its inputs: function(*args, **kwargs) runs it again."""

    operation: Operation
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
