"""A recorded call on a slice of its data computes the same slice of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rooftile.diagnosis.experiments.scaled import grown, part, whole
from rooftile.diagnosis.records import Sample
from rooftile.diagnosis.watch import Record, Watch

x, y = torch.randn(64, 48), torch.randn(64, 48)
table, rows = torch.randn(100, 8), torch.randint(0, 100, (32,))


def sample_of(step: Callable[[], Any], op: str) -> Sample:
    with Watch() as watch:
        step()
    operation = next(o for o in watch.operations if o.op == f"aten::{op}")
    with Record([operation], 1 << 24) as record:
        step()
    return record.samples[operation.key]


@pytest.mark.parametrize(
    ("op", "step", "cut"),
    [
        ("add", lambda: x + y, lambda o: o[:16]),
        ("add", lambda: x + y[0], lambda o: o[:16]),
        ("add", lambda: x[None] + y, lambda o: o[:, :16]),
        ("mm", lambda: x @ y.t()[:, :40], lambda o: o[:16]),
        ("mm", lambda: x[:8] @ y.t(), lambda o: o[:, :16]),
        ("addmm", lambda: F.linear(x[:8], y, torch.ones(64)), lambda o: o[:, :16]),
        ("bmm", lambda: torch.bmm(x.view(16, 4, 48), y.view(16, 48, 4)), lambda o: o[:4]),
        ("embedding", lambda: F.embedding(rows, table), lambda o: o[:8]),
        ("_softmax", lambda: torch.softmax(x, -1), lambda o: o[:16]),
    ],
)
def test_a_quarter(op: str, step: Callable[[], Any], cut: Callable[[Any], Any]) -> None:
    sample = sample_of(step, op)
    smaller = part(sample, 0.25)
    assert smaller is not None
    assert smaller.share == 0.25
    torch.testing.assert_close(smaller.run(), cut(whole(sample)()))


def test_what_cannot_be_cut_says_so() -> None:
    assert part(sample_of(lambda: torch.ones(1) + 1, "add"), 0.5) is None
    assert part(sample_of(lambda: torch.cat([x, y]), "cat"), 0.5) is None
    assert part(sample_of(lambda: x + y, "add"), 1e-9).share == 1 / 64
    assert grown(sample_of(lambda: x + y, "add"), 2) is None


@pytest.mark.parametrize(
    ("op", "step"),
    [
        ("mm", lambda: x @ y.t()),
        ("addmm", lambda: F.linear(x, y, torch.ones(64))),
        ("bmm", lambda: torch.bmm(x.view(16, 4, 48), y.view(16, 48, 4))),
    ],
)
def test_a_product_with_three_times_the_rows(op: str, step: Callable[[], Any]) -> None:
    sample = sample_of(step, op)
    more = grown(sample, 3)
    assert more is not None
    due = torch.cat([whole(sample)()] * 3, dim=-2)
    torch.testing.assert_close(more.run(), due)
    assert more.share == 3
