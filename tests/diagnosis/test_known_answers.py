"""Programs whose bound is known, with wide margins: the cores of a test machine are shared, so each has a second try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import rooftile as rt
from rooftile.diagnosis.output.rows import Op


def large() -> torch.Tensor:
    return torch.randn(1 << 24)


def product(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
    x, y = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    return lambda: x @ y


def elementwise() -> Callable[[], Any]:
    x = large()
    return lambda: x + 1.5


def copy() -> Callable[[], Any]:
    x = large()
    return lambda: x.clone()


def gather() -> Callable[[], Any]:
    table, rows = torch.randn(40_000, 256), torch.randint(0, 40_000, (40_000,))
    return lambda: F.embedding(rows, table)


def special() -> Callable[[], Any]:
    x = torch.rand(1 << 20) + 1
    return lambda: torch.lgamma(x)


def tiny() -> Callable[[], Any]:
    x = torch.ones(8)

    def step() -> torch.Tensor:
        y = x
        for _ in range(2000):
            y = y + 1
        return y

    return step


def multiply_adds() -> Callable[[], Any]:
    x = torch.randn(1 << 17)
    return lambda: torch.ops.rooftile_test.fma_200(x)


@pytest.fixture
def fma_200() -> Iterator[None]:
    """An operator that does 200 multiply-adds on pieces that stay in the cache, as a fused kernel would."""

    def run(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(x)
        for start in range(0, x.numel(), 8192):
            piece = x[start : start + 8192].clone()
            for _ in range(200):
                piece.mul_(0.9).add_(0.1)
            made[start : start + 8192] = piece
        return made

    with torch.library._scoped_library("rooftile_test", "FRAGMENT") as library:
        library.define("fma_200(Tensor x) -> Tensor")
        library.impl("fma_200", run, "CPU")
        counts = rt.diagnosis.counts(flops=lambda x: 400 * x.numel(), bytes=lambda x: 2 * x.nbytes)
        counts(torch.ops.rooftile_test.fma_200.default)
        yield


def leading(program: Callable[[], Any]) -> Op:
    return max(rt.diagnose(program, budget=3).ops, key=lambda op: op.time_us)


@pytest.mark.usefixtures("fma_200")
@pytest.mark.parametrize(
    ("make", "bound", "units"),
    [
        (elementwise, "memory", {"DRAM"}),
        (copy, "memory", {"DRAM"}),
        (gather, "memory", {"DRAM"}),
        (lambda: product(3000, 16, 3000), "memory", {"DRAM"}),
        (lambda: product(640, 640, 640), "compute", {"fp32"}),
        (lambda: product(512, 512, 512, torch.float64), "compute", {"fp64"}),
        (special, "compute", {"special"}),
        (multiply_adds, "compute", {"fp32"}),
        (tiny, "overhead", {None}),
    ],
    ids=["addition", "copy", "gather", "product, K = 16", "product", "fp64 product", "lgamma", "200 multiply-adds", "tiny"],
)
def test_the_bound_and_its_unit(make: Callable[[], Callable[[], Any]], bound: str, units: set[str | None]) -> None:
    program = make()
    op = leading(program)
    if op.bound != bound:
        op = leading(program)
    assert (op.bound, op.unit in units) == (bound, True), op
    assert op.confidence in ("measured", "confirmed"), op


def test_an_operator_that_writes_to_its_argument_has_its_experiments() -> None:
    x = torch.zeros(1 << 20)
    op = leading(lambda: x.add_(1.0))
    assert op.op == "aten::add_"
    assert op.experiments["cache"]["gain"] is not None
    assert op.experiments["size"]["fixed_us"] is not None
