"""All algorithms of cuSPARSELt, for the table in `rooftile.weights.two_four.product.cusparselt`.

The products are the four of an 8B model's layer, as CUDA graphs. A row has the times of all four by one algorithm, with its
result (N, M) as it comes or transposed, and their ratio to the times of PyTorch's dense products of the same numbers. An
algorithm whose results differ from the dense product says so instead. fp16 is absent: one of its algorithms ends in an
illegal instruction, after which the GPU takes no more work from the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.cost.session import Session
from rooftile.hardware.clock import ReplayClock, Work, take_turns
from rooftile.weights.two_four import two_four
from rooftile.weights.two_four.product.cusparselt import Algorithm, sums
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.suites.linear import MOST_ERROR, PRODUCTS

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# the dtype of sums that our products with codes take
SUMS = {"fp8": torch.float32, "int8": torch.int32}
# numbers of algorithms that are tried
MOST = 40


class Case(NamedTuple):
    """A product: x (M, K), the weight in the library's layout, and the dense product of the same numbers."""

    x: Tensor
    packed: Tensor
    dense: Callable[[], Tensor]


def case_of(name: str, M: int, N: int, K: int) -> Case:
    """Makes random numbers, of which two of each four weights are zero."""
    x, w = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16()
    w = torch.where(two_four(w), w, 0)
    if name == "int8":
        x, w = (x * 20).to(torch.int8), (w * 20).to(torch.int8)
        return Case(x, torch._cslt_compress(w), lambda: torch._int_mm(x, w.T))
    x, w = x.to(DTYPES[name]), w.to(DTYPES[name])
    one = torch.ones((), device="cuda")
    dense = {"fp8": lambda: torch._scaled_mm(x, w.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)}
    return Case(x, torch._cslt_compress(w), dense.get(name, lambda: x @ w.T))


def multiply(case: Case, name: str, algorithm: Algorithm) -> Tensor:
    """Multiplies by an algorithm."""
    return sums(case.x, case.packed, None, SUMS.get(name), algorithm)


def is_right(case: Case, name: str, algorithm: Algorithm) -> bool:
    """Whether results agree with the dense product."""
    due, y = case.dense().float(), multiply(case, name, algorithm).float()
    return bool(((y if algorithm.transposes else y.T) - due).abs().mean() <= MOST_ERROR * due.abs().mean())


def algorithms_of(name: str) -> list[Algorithm]:
    """Returns the algorithms that the library knows: it has others for a transposed result."""
    case, found = case_of(name, 256, 256, 256), []
    for transposes in (False, True):
        for number in range(MOST):
            try:
                multiply(case, name, Algorithm(number, transposes))
            # the library refuses a number that it does not know
            except RuntimeError:
                break
            found.append(Algorithm(number, transposes))
    return found


def measure(session: Session, dtypes: Sequence[str], rows: Sequence[int], say: Progress) -> Iterator[Row]:
    """Yields the rows of all products, the fastest algorithm first."""
    for name, M in product(dtypes, rows):
        say(f"{name}, {M} rows")
        with torch.inference_mode():
            found = sorted(algorithms(session, name, M), key=lambda row: row.median_us or math.inf)
        yield from found


def algorithms(session: Session, name: str, M: int) -> Iterator[Row]:
    """Yields a row for each algorithm."""
    cases = [case_of(name, M, N, K) for N, K in PRODUCTS]
    for algorithm in algorithms_of(name):
        named: dict[str, Any] = {
            "suite": "cusparselt", "case": f"8b-{name}-r{M}", "phase": "fwd",
            "backend": f"algorithm-{algorithm.number}" + "-transposed" * algorithm.transposes,
            "settings": {"cusparselt": torch.backends.cusparselt.version()},
        }  # fmt: skip
        if not all(is_right(case, name, algorithm) for case in cases):
            yield timed_row(session, [], reason="its results are wrong", **named)
            continue
        works: dict[str, Work] = {
            "dense": lambda: [case.dense() for case in cases],
            "sparse": partial(_all, cases, name, algorithm),
        }
        # a clock keeps its graphs, and with them their results, so each algorithm has its own
        taken = take_turns(works, ReplayClock(times=3), rounds=3)
        ratio = median(taken["sparse"]) / median(taken["dense"])
        yield with_measures(timed_row(session, taken["sparse"], **named), of_dense_ratio=ratio)


def _all(cases: list[Case], name: str, algorithm: Algorithm) -> None:
    for case in cases:
        multiply(case, name, algorithm)
