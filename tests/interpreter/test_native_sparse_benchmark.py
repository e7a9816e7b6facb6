"""The benchmark of Native Sparse Attention's kernels, dry: every variant is checked and timed on a short text."""

from __future__ import annotations

import json

import pytest
import torch

from rooftile.approximate.native_sparse.selected import kernels
from rooftile_lab.bench.native_sparse import run, variants
from tests.bench.session import SESSION

# numpy warns where a GPU does not
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = variants.Sizes(80, 2, 1, 16, 16, 64, 3)
OPTIONS = {"lengths": [80], "kinds": ["alike"], "queries": [16], "stages": [2], "rounds": 1}


def test_every_part_and_variant_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        def samples(self, work) -> list[float]:
            work()
            return [5.0]

    monkeypatch.setattr(run, "clock_for", lambda device: Clock())
    said: list[str] = []
    rows = [json.loads(row.json()) for row in run.measure(SESSION, SIZES, said.append, **OPTIONS)]
    assert said == ["checking the variants", "alike, 80 tokens"]
    named = {(row["backend"], row["phase"]): row for row in rows}
    assert len(named) == len(rows)
    for name in ("compressed", "selected", "near", "gates", "whole", "exact"):
        assert {named[name, phase]["median_us"] for phase in ("fwd", "bwd")} == {5.0}
    assert "tflops" in named["choice", "fwd"]
    assert named["fla selection", "fwd"]["reason"] == "not installed, or no GPU"
    for phase in ("fwd", "dq", "dkdv"):
        assert named["16 queries, 4 warps, 2 stages", phase]["measures"]["through_l2_bytes"] > 0
    # neighbours that choose alike: a tile reads little more than a query
    assert named["16 queries", "tiles"]["measures"]["union_blocks"] < 4


def test_a_variant_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = variants.Sizes(96, 2, 1, 16, 16, 16, 3)
    one = variants.Variant(8, 2, 2)
    assert variants.complaint(one, sizes, torch.device("cpu"), torch.float32) is None
    dq = kernels.dq
    monkeypatch.setattr(kernels, "dq", lambda *given: 1.1 * dq(*given))
    reason = variants.complaint(one, sizes, torch.device("cpu"), torch.float32)
    assert reason is not None
    assert reason.startswith("dq differs from plain operations by 0.1")


def test_choices_are_as_their_kind_says() -> None:
    sizes = variants.Sizes(640, 2, 1, 16, 16, 16, 6)
    for kind, run_of in variants.KINDS.items():
        chosen = variants.choices(kind, sizes, torch.device("cpu"))
        assert chosen.shape == (640, 1, 6)
        own = torch.arange(640) // 16
        assert (chosen.max(-1).values[:, 0] == own).all()
        tail = chosen[320:].view(-1, run_of, 6)
        assert (tail == tail[:, :1]).all()
