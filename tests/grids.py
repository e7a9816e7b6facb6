"""Splits a grid of parameters in two: `make test` runs a few cases that cover it, `make test-all` runs every case."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def covering(cases: Iterable[T], traits: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Returns a few of the cases, in their order, that together have every trait. Takes the case with most new traits first."""
    left = {n: (case, set(traits(case))) for n, case in enumerate(cases)}
    taken = []
    while any(new for _, new in left.values()):
        best = max(left, key=lambda n: len(left[n][1]))
        case, covered = left.pop(best)
        taken.append((best, case))
        for _, new in left.values():
            new -= covered
    return [case for _, case in sorted(taken, key=lambda pair: pair[0])]


def pairs(case: Iterable[Hashable]) -> Iterable[Hashable]:
    """The traits of a case of a product: every two of its values, with their places."""
    return combinations(enumerate(case), 2)


def swept(cases: Iterable[T], traits: Callable[[T], Iterable[Hashable]]) -> list[Any]:
    """Returns all cases as pytest parameters; those that the covering cases make redundant have the mark `sweep`."""
    cases = list(cases)
    kept = covering(cases, traits)
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=() if case in kept else pytest.mark.sweep)
        for case in cases
    ]
