"""Every case on every backend, forward and backward: it equals the definition, or it refuses and says why."""

from __future__ import annotations

import pytest
import torch

from rooftile.exact.cases import Case, tagged
from tests.conformance.exact import PHASES, check


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", tagged("conformance"), ids=lambda case: case.name)
def test_equals_the_definition_or_refuses(case: Case, phase: str, backend: str, device: torch.device) -> None:
    check(case, phase, backend, device)
