"""`States`: copies of rows are those that were asked for, however many layers are copied at a time."""

from __future__ import annotations

import pytest
import torch

from rooftile.kvcache import states
from rooftile.kvcache.specs import State


@pytest.mark.parametrize("room", [1, 60, 1 << 20])
def test_all_sources_are_read_before_a_target_is_written(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "COPIED", room)
    specs = [State((0, 2, 3, 5, 7), "sums", (3, 2), torch.float32), State((1, 4), "tails", (5,), torch.bfloat16)]
    found = states.States(specs, states.StateRows(4, 0), torch.device("cpu"))
    for memory in found.memory.values():
        memory.copy_(torch.randn(memory.shape))
    before = {name: memory.clone() for name, memory in found.memory.items()}
    # two that change places, and one that is copied twice
    found.copy({0: 1, 1: 0, 3: 2, 5: 2})
    for name, memory in found.memory.items():
        assert torch.equal(memory, before[name][:, [1, 0, 2, 2, 4, 2]])
    found.copy({})
    assert torch.equal(found.memory["tails"], before["tails"][:, [1, 0, 2, 2, 4, 2]])
