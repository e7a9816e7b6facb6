"""Attention on random problems: each equals the definition, or is refused."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.exact import PHASES, check
from tests.conformance.random_cases import draw_case


# the fixtures hold constants, which no example changes; four phases on each backend have their own examples
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=min(50, settings().max_examples))
@given(seed=st.integers(0, 1 << 32))
@pytest.mark.parametrize("phase", PHASES)
def test_a_random_problem_equals_the_definition(phase: str, backend: str, device: torch.device, seed: int) -> None:
    check(draw_case(random.Random(seed)), phase, backend, device)
