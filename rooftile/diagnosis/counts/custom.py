"""Counts that a user gives for an operator of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rooftile.runtime.words import answers_foreign_words

Count = Callable[..., int]
T = TypeVar("T")
# by the operator's name, such as "mylib::rotate"
GIVEN: dict[str, tuple[Count | None, Count | None]] = {}


@answers_foreign_words
def counts(flops: Count | None = None, bytes: Count | None = None) -> Callable[[T], T]:
    """Says what one call of a custom operator computes and moves.

    Args:
        flops, bytes: take the operator's arguments and give a number.

    Example:
        >>> @rooftile.diagnosis.counts(flops=lambda x: 6 * x.numel(), bytes=lambda x: 2 * x.nbytes)
        ... @torch.library.custom_op("mylib::rotate", mutates_args=())
        ... def rotate(x: torch.Tensor) -> torch.Tensor: ...
    """

    def register(operator: T) -> T:
        overload = getattr(operator, "_opoverload", operator)
        schema = getattr(overload, "_schema", None)
        if schema is None:
            raise TypeError(f"counts decorates {operator!r}; give an operator made by torch.library.custom_op or triton_op")
        GIVEN[schema.name] = flops, bytes
        return operator

    return register
