"""An engine's steps and a training step on a GPU: every launch belongs to one call of an operator that a mode sees."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.operator_steps import engine_steps, training_step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_engine_launches_nothing_outside_operators(kv_dtype: str) -> None:
    engine_steps(torch.device("cuda"), torch.bfloat16, kv_dtype)


def test_a_training_step_launches_nothing_outside_operators() -> None:
    training_step(torch.device("cuda"), torch.bfloat16)
