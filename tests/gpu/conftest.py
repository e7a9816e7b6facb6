"""The device of tests that need a GPU: without this, a run that forgets --device cuda would test plain operations on a CPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Returns the GPU."""
    return torch.device("cuda")
