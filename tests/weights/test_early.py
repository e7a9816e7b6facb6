"""When a product in a CUDA graph may read its weight before the kernel in front of it has ended."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rooftile.engine.sampling.features import SamplingFeatures
from rooftile.engine.steps.graphs import DecodeGraphs
from rooftile.runtime import early_weights
from rooftile.runtime.early_weights import may_read_early, may_read_early_in_graphs, weights_stay


def test_a_product_waits_unless_a_graph_is_captured_whose_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = [False]
    monkeypatch.setattr(early_weights, "is_capturing", lambda: captures[0])
    with weights_stay():
        assert not may_read_early(), "outside of graphs the kernel in front may have made the weight"
    captures[0] = True
    assert not may_read_early(), "a user's graph may write to a weight"
    with weights_stay():
        assert may_read_early()
        with weights_stay():
            assert may_read_early()
        assert may_read_early()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(may_read_early()))
        thread.start()
        thread.join()
        assert seen == [False], "what this thread captures says nothing of another's"
    assert not may_read_early()
    with pytest.raises(ValueError, match="stops"), weights_stay():
        raise ValueError("stops")
    assert not may_read_early()


def test_an_engine_says_that_its_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its graphs, and not in the run before them."""
    seen = []

    @contextmanager
    def capture(*arguments: object, **options: object):
        yield

    def decode(inputs: torch.Tensor, features: SamplingFeatures, groups: None):
        seen.append(may_read_early_in_graphs())
        return inputs, inputs

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, found in {
        "Stream": lambda device: stream, "current_stream": lambda: stream, "CUDAGraph": object, "graph": capture,
        "stream": capture, "graph_pool_handle": lambda: (0, 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, found)
    graphs = DecodeGraphs(torch.device("cpu"), SimpleNamespace(), pad_slot=2, most_rows=2)
    graphs._capture(decode, 1, SamplingFeatures(chance=True), adapted=False)
    assert seen == [False, True]
