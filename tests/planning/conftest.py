"""The machine of these tests."""

from __future__ import annotations

import pytest

from rooftile.hardware import ceilings
from rooftile.planning import make_plan
from tests.planning.machine import CEILINGS, Pretended


@pytest.fixture(autouse=True)
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Replaces this machine's ceilings and clock."""
    pretended = Pretended()
    monkeypatch.setattr(ceilings, "measure", lambda device: CEILINGS)
    monkeypatch.setattr(make_plan, "stopwatch_for", lambda device: pretended)
    return pretended
