"""An engine's model, and a look at what is left after each test."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rooftile.engine import LLM
from tests.engine.asking import ROOM


@pytest.fixture
def llm(peers) -> LLM:
    return LLM(peers("llama").folder, **ROOM)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "rooftile engine"] == []
