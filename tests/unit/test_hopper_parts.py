"""How the Hopper backward cuts a key head's group where there are few tiles of keys."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

import torch

from rooftile.backends.hopper import launch_bwd
from rooftile.masks import CAUSAL
from rooftile.spec import Sizes, Spec

DEVICE = torch.device("cpu")


def parts(group: int, *, B: int, S: int, Hk: int, dim: int = 128, layout: str = "dense", deterministic: bool = False) -> int:
    spec = Spec(
        dtype=torch.bfloat16, dim=dim, dim_v=dim, scale=1.0, group=group, mask=CAUSAL, layout=layout,
        deterministic=deterministic, device="sm90",
    )  # fmt: skip
    return launch_bwd.parts_of_group(spec, Sizes(B=B, T=S, S=S, H=group * Hk, Hk=Hk), DEVICE)


@pytest.fixture(autouse=True)
def _a_chip_of_132(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_bwd, "processors", lambda device: 132)


def test_enough_tiles_leave_a_group_whole() -> None:
    # 8 x 64 tiles of 128 keys and 2 sequences: more than four a multiprocessor
    assert parts(4, B=2, S=8192, Hk=8) == 1
    # tiles of 64 keys are twice as many
    assert parts(4, B=1, S=8192, Hk=5, dim=256) == 1


def test_few_tiles_cut_it_until_there_are_enough_or_heads_are_single() -> None:
    assert parts(8, B=2, S=8192, Hk=2) == 4
    assert parts(8, B=1, S=128, Hk=1) == 8
    # three query heads have no half
    assert parts(6, B=1, S=128, Hk=1) == 2
    assert parts(1, B=1, S=128, Hk=1) == 1


def test_packed_sequences_count_by_their_total() -> None:
    assert parts(8, B=3, S=16384, Hk=8, layout="packed") == 1
    assert parts(8, B=3, S=1024, Hk=8, layout="packed") == 8


def test_an_order_of_the_sums_does_not_depend_on_the_batch() -> None:
    for B in (1, 64):
        assert parts(8, B=B, S=128, Hk=1, deterministic=True) == 1
