"""`Targets(n)` on the Triton kernels, whose offsets of packed sequences name empty ones beside the targets."""

from __future__ import annotations

import pytest

from tests.conformance import test_targets as targets
from tests.conformance.test_targets import _on_the_device  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("word", ["", "alibi per sequence", "dropout", "sinks"])
def test_packed(word: str) -> None:
    targets.test_packed("window", word, "triton")


@pytest.mark.parametrize("word", ["alibi", "bias", "dropout"])
def test_dense(word: str) -> None:
    targets.test_dense("causal", word, "triton")
