"""Operators and gaps are the step within 2 %, or a note says what is missing."""

from __future__ import annotations

import pytest

from rooftile.diagnosis.missing import missing


@pytest.mark.parametrize(
    ("operators_us", "replayed_us", "on_gpu", "words"),
    [
        (789.0, 0.0, True, None),
        (819.0, 0.0, False, None),
        (700.0, 0.0, False, "100 us of the step are in no operator and in no gap: views"),
        (700.0, 0.0, True, "100 us of the step are in no operator and in no gap: kernels that no operator asked for"),
        (900.0, 0.0, True, "operators and gaps add up to 1.1 ms, and the step takes 1 ms"),
        (0.0, 700.0, True, "700 us of kernels are replayed from a CUDA graph"),
    ],
)
def test_what_is_missing(operators_us: float, replayed_us: float, on_gpu: bool, words: str | None) -> None:
    found = missing(
        step_us=1000.0, profiled_us=1000.0, operators_us=operators_us, idle_us=200.0, replayed_us=replayed_us, on_gpu=on_gpu
    )  # fmt: skip
    assert len(found) == (words is not None)
    assert words is None or found[0].startswith(words)


def test_a_machine_that_is_busy_at_times_is_no_operator_that_is_missing() -> None:
    given = {"operators_us": 400.0, "idle_us": 190.0, "replayed_us": 0.0, "on_gpu": False}
    (busy,) = missing(step_us=1000.0, profiled_us=600.0, **given)
    assert busy.startswith("the step takes 1 ms in the median, and took 600 us when its operators were timed")
    (views,) = missing(step_us=1000.0, profiled_us=980.0, **given)
    assert "in no operator and in no gap" in views
