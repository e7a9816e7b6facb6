"""The suites of fused operations and of the loss: what is timed was compared before, and what is not timed says why."""

from __future__ import annotations

import pytest
import torch

from rooftile_lab.bench import fused_peers
from rooftile_lab.bench.suites import fused, loss
from tests.bench.session import SESSION


def quiet(words: str) -> None:
    """No progress."""


def test_a_row_for_each_operation_contestant_and_phase() -> None:
    found = list(fused.measure(SESSION, fused.CPU, quiet))
    timed = {(row.case.removesuffix("-64x256"), row.backend, row.phase): row for row in found if row.median_us is not None}
    for name in fused.OPERATIONS:
        for phase in ("fwd", "bwd"):
            assert timed[name, "torch", phase].gbs > 0
            assert timed[name, "rooftile", phase].measures["of_fastest_peer_ratio"] > 0
    assert timed["rms-norm-to-fp8", "rooftile", "fwd"].gbs > 0
    reasons = {row.backend: row.reason for row in found if row.reason}
    assert set(reasons) <= {"liger", "quack"}
    assert all(reason.startswith("refused: ModuleNotFoundError") for reason in reasons.values())


@pytest.mark.parametrize(
    ("name", "phase", "numbers"),
    [
        ("rms-norm", 0, 2), ("rms-norm", 1, 3), ("add-rms-norm", 0, 4), ("add-rms-norm", 1, 4),
        ("swiglu", 0, 3), ("swiglu", 1, 5), ("rotary", 0, 2), ("softmax", 0, 2), ("softmax", 1, 3),
        ("cross-entropy", 0, 1), ("cross-entropy", 1, 2),
    ],
)  # fmt: skip
def test_counted_numbers_are_those_of_the_design(name: str, phase: int, numbers: float) -> None:
    operation = fused.OPERATIONS[name]
    assert operation.read[phase] + operation.written[phase] == numbers


def test_the_loss_beside_torch() -> None:
    found = {row.backend: row for row in loss.measure(SESSION, loss.CPU, quiet)}
    assert found["rooftile"].measures["of_fastest_peer_ratio"] > 0
    assert found["torch"].peak_bytes > 0
    # TFLOP/s of three products
    due = 6 * 64 * 515 * 32 / found["torch"].median_us / 1e6
    assert found["torch"].tflops == pytest.approx(due, rel=1e-4)
    assert found["cut-cross-entropy"].reason.startswith("refused: ")


def test_a_contestant_with_wrong_results_or_gradients_is_refused() -> None:
    x, w = torch.randn(4, 8), torch.randn(8)

    def formula(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    assert fused_peers.refusal(formula, formula, [x, w]) == ""
    assert "its error is" in fused_peers.refusal(lambda x, w: 1.1 * x * w, formula, [x, w])
    assert "its error is" in fused_peers.refusal(lambda x, w: x * w.detach() + 0 * w, formula, [x, w])
    assert fused_peers.refusal(lambda x, w: x[:2] * w, formula, [x, w]).startswith("RuntimeError: Mismatch in shape")
    assert fused_peers.refusal(fused_peers.named("no_such_package", "f"), formula, [x, w]).startswith("ModuleNotFoundError")
