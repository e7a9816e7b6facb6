"""An engine's steps and a training step in the interpreter: every launch belongs to one call of an operator that a mode sees."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.operator_steps import engine_steps, training_step

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_engine_launches_nothing_outside_operators(kv_dtype: str) -> None:
    engine_steps(torch.device("cpu"), torch.float32, kv_dtype)


def test_a_training_step_launches_nothing_outside_operators() -> None:
    training_step(torch.device("cpu"), torch.float32)
