"""Sequences split over two GPUs, by NCCL: attention by every method, and recurrences, forward and backward, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import parallel_cases
from tests.parallel.processes import run_on

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def assert_exact(answers: list[parallel_cases.Errors]) -> None:
    """One GPU's error, half apart: a sum over all tokens has few numbers, whose rounding differs with the order."""
    for found in answers:
        assert len(found) >= 6
        assert [each for each in found if not each[1] <= 1.5 * each[2] + 1e-6] == []


def test_attention() -> None:
    assert_exact(run_on(2, parallel_cases.attention, backend="nccl"))


@pytest.mark.parametrize("kind", ["ssd", "gated_delta", "selective_scan", "causal_conv", "linear"])
def test_recurrences(kind: str) -> None:
    ways: tuple[dict[str, Any], ...] = ({"method": "scan"}, {"method": "heads"}) if kind == "gated_delta" else ({},)
    assert_exact(run_on(2, parallel_cases.recurrences, kind, ways, backend="nccl"))
