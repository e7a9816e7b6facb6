"""How the Hopper kernels divide a group: the backward cuts it if tiles of keys are few, the forward takes short heads at once."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed on this platform")

import torch

from rooftile.exact.backends.hopper import plan
from rooftile.exact.backends.hopper.flash_bwd import launch_backward as backward
from rooftile.exact.backends.hopper.flash_fwd import launch_forward as forward
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import Sizes, Spec

DEVICE = torch.device("cpu")


def parts(group: int, *, B: int, S: int, Hk: int, dim: int = 128, layout: str = "dense", deterministic: bool = False) -> int:
    spec = Spec(
        dtype=torch.bfloat16, dim=dim, dim_v=dim, scale=1.0, group=group, mask=CAUSAL, layout=layout,
        deterministic=deterministic, device="sm90",
    )  # fmt: skip
    return backward.parts_of_group(spec, Sizes(B=B, T=S, S=S, H=group * Hk, Hk=Hk), DEVICE)


@pytest.fixture(autouse=True)
def _a_chip_of_132(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plan, forward, backward):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    forward.tile_of.cache_clear()


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


def together(group: int, *, B: int, T: int, Hk: int = 8, layout: str = "dense") -> int:
    spec = Spec(dtype=torch.bfloat16, dim=128, dim_v=128, scale=1.0, group=group, mask=CAUSAL, layout=layout, device="sm90")
    return forward.tile_of(spec, Sizes(B=B, T=T, S=8192, H=group * Hk, Hk=Hk), DEVICE).HEADS_PER_TILE


def test_heads_of_a_group_share_tiles_where_that_saves_rounds() -> None:
    # 4,096 tiles of a query or two become 512
    assert together(8, B=64, T=1) == 8
    assert together(8, B=64, T=2) == 8
    assert together(8, B=64, T=64, layout="packed") == 8
    # 1,024 tiles of 100 queries, in rounds of 132: 8, or 7 of tiles with 16 positions of 8 heads
    assert together(8, B=16, T=100) == 8


def test_heads_stay_alone_where_it_saves_little() -> None:
    assert together(8, B=4, T=4096) == 1
    # no more tiles than multiprocessors: each walks its keys at the same time
    assert together(8, B=1, T=1) == 1
    # nothing that a group of 7 could be cut into
    assert together(7, B=64, T=1) == 1
    assert together(6, B=64, T=1) == 2
