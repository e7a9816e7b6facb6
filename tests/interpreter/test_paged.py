"""The Triton kernels for a paged cache, interpreted: what attention to the same keys and values laid out plainly is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

import rooftile as rt
from rooftile.exact.masks import Mask
from rooftile.kvcache import PagedKV
from tests.grids import swept
from tests.unit.test_paged import MASKS, in_fp8, paged, sequences, sharing

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


SHAPES = [(16, 1, 4, 2), (8, 5, 10, 2), (64, 40, 2, 2), (16, 2, 71, 1)]
GRID = [(*shape, mask, deterministic) for shape in SHAPES for mask in MASKS for deterministic in (False, True)]


# each mask and each shape with both kernels
@pytest.mark.parametrize(
    ("size", "T", "H", "Hk", "mask", "deterministic"), swept(GRID, lambda case: (case[:4] + case[5:], case[4:])), ids=str
)
def test_dense_queries(size: int, T: int, H: int, Hk: int, mask: Mask, deterministic: bool) -> None:
    held = sequences(Hk=Hk)
    q = torch.randn(len(held), T, H, 16)
    found = rt.attention_paged_with_lse(q, paged(held, size), mask, deterministic=deterministic, backend="triton")
    due = rt.attention_paged_with_lse(q, paged(held, size, seed=1), mask, backend="eager")
    torch.testing.assert_close(found, due)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0}, {"sinks": torch.tensor([1.0, -1.0, 0.0, 3.0])}, {"alibi": torch.rand(4)}, {"alibi": torch.rand(5, 4)},
        {"scale": 2.0},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
@pytest.mark.parametrize("deterministic", [False, True], ids=["shared work", "chunks"])
def test_options(options, deterministic: bool) -> None:
    held, q = sequences(D=24, Dv=40), torch.randn(5, 3, 4, 24)
    found = rt.attention_paged_with_lse(q, paged(held, 16), rt.CAUSAL, deterministic=deterministic, backend="triton", **options)
    due = rt.attention_paged_with_lse(q, paged(held, 16), rt.CAUSAL, backend="eager", **options)
    torch.testing.assert_close(found, due)


@pytest.mark.parametrize("deterministic", [False, True], ids=["shared work", "chunks"])
def test_a_sink_of_minus_infinity_where_no_key_is_seen(deterministic: bool) -> None:
    held, q = sequences((70, 1, 0), D=16, Dv=16), torch.randn(3, 4, 4, 16)
    sinks = torch.full((4,), -torch.inf)
    o, lse = rt.attention_paged_with_lse(
        q, paged(held, 16), rt.CAUSAL, sinks=sinks, deterministic=deterministic, backend="triton"
    )
    torch.testing.assert_close((o, lse), rt.attention_paged_with_lse(q, paged(held, 16), rt.CAUSAL, backend="eager"))
    assert (o[2] == 0).all()
    assert (lse[2] == -torch.inf).all()


@pytest.mark.parametrize("deterministic", [False, True], ids=["shared work", "chunks"])
def test_a_cache_in_fp8(deterministic: bool) -> None:
    """Scores and weights get the scales that the definition gives keys and values."""
    cache, _ = in_fp8(paged(sequences((70, 5, 0, 33), D=16, Dv=16), 16))
    q, sinks = torch.randn(4, 2, 4, 16), torch.randn(4)
    for mask in (rt.CAUSAL, rt.CAUSAL & rt.Window(20)):
        found = rt.attention_paged_with_lse(q, cache, mask, sinks=sinks, deterministic=deterministic, backend="triton")
        torch.testing.assert_close(found, rt.attention_paged_with_lse(q, cache, mask, sinks=sinks, backend="eager"))


@pytest.mark.parametrize("deterministic", [False, True], ids=["shared work", "chunks"])
def test_a_scale_that_fp16_has_no_number_for(deterministic: bool) -> None:
    """Though it has one for each value."""
    cache, _ = in_fp8(paged(sequences((70, 5, 0, 33), D=16, Dv=16), 16))
    small = (cache.v.float() / 2048).to(torch.float8_e4m3fn)
    cache = replace(cache, v=small, v_scale=torch.full_like(cache.v_scale, 1e5))
    q = torch.randn(4, 1, 4, 16).half()
    due = rt.attention_paged(q.float(), cache, rt.CAUSAL, backend="eager")
    assert due.abs().max() > 1e4
    found = rt.attention_paged(q, cache, rt.CAUSAL, deterministic=deterministic, backend="triton")
    assert ((found - due).abs() <= 1e-2 * due.abs().amax(-1, keepdim=True)).all()


def test_a_shared_prefix() -> None:
    cache, _ = sharing()
    q, sinks = torch.randn(3, 5, 4, 16), torch.randn(4)
    found = rt.attention_paged_with_lse(q, cache, rt.CAUSAL, shared_prefix=48, sinks=sinks, backend="triton")
    torch.testing.assert_close(found, rt.attention_paged_with_lse(q, cache, rt.CAUSAL, sinks=sinks, backend="eager"))


def test_packed_queries() -> None:
    held = sequences()
    cu_q = torch.tensor([0, 20, 21, 21, 85, 86], dtype=torch.int32)
    q = torch.randn(86, 4, 16)
    plain = paged(held, 16)
    cache = PagedKV(plain.k, plain.v, plain.table, plain.lengths, cu_q)
    for mask in (rt.CAUSAL, rt.CAUSAL & rt.Window(9)):
        found = rt.attention_paged_with_lse(q, cache, mask, backend="triton")
        torch.testing.assert_close(found, rt.attention_paged_with_lse(q, cache, mask, backend="eager"))


@pytest.mark.parametrize("mask", [rt.CAUSAL, rt.CAUSAL & rt.Window(1500)], ids=str)
def test_bits_do_not_depend_on_the_batch(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences by themselves, whose chunks go to programs of their own, and among others, where they do not."""
    from rooftile.exact.backends.triton import paged_fwd

    held = sequences((2100, 900, 1030), Hk=1)
    for k, _ in held:
        # the largest scores come last, so that a join has something to scale
        k[-6:] *= 4
    q = torch.randn(3, 1, 2, 16)
    together = rt.attention_paged_with_lse(q, paged(held, 16), mask, deterministic=True, backend="triton")
    torch.testing.assert_close(together, rt.attention_paged_with_lse(q, paged(held, 16), mask, backend="eager"))
    for b, sequence in enumerate(held):
        alone = rt.attention_paged_with_lse(q[b : b + 1], paged([sequence], 16), mask, deterministic=True, backend="triton")
        assert torch.equal(alone[0][0], together[0][b])
        assert torch.equal(alone[1][0], together[1][b])
    for bound in ("ENOUGH", "MOST_NUMBERS"):
        with monkeypatch.context() as patch:
            patch.setattr(paged_fwd, bound, 0)
            unsplit = rt.attention_paged_with_lse(q, paged(held, 16), mask, deterministic=True, backend="triton")
        assert torch.equal(unsplit[0], together[0])
        assert torch.equal(unsplit[1], together[1])


@pytest.mark.parametrize("T", [20, 40])
def test_a_nan_stays_where_it_is_seen(T: int) -> None:
    held = sequences((60, 60), Hk=1)
    held[0][1][25, 0, 3] = torch.nan
    held[1][0][50, 0, 0] = torch.inf
    q = torch.randn(2, T, 1, 16)
    mask = rt.CAUSAL & rt.Window(20)
    found = rt.attention_paged(q, paged(held, 16), mask, backend="triton")
    due = rt.attention_paged(q, paged(held, 16), mask, backend="eager")
    lost = found.isnan().any(-1)
    assert torch.equal(lost, due.isnan().any(-1))
    assert 0 < lost.sum() < lost.numel() / 2


SHARED_BY = list(product((1, 4, 14, 80), (rt.CAUSAL, rt.CAUSAL & rt.Window(100), rt.Chunk(64))))
# the 80 causal programs alone leave more partials of a sequence than are merged at once
USUAL = [(1, rt.CAUSAL), (4, rt.CAUSAL & rt.Window(100)), (14, rt.Chunk(64)), (80, rt.CAUSAL)]


@pytest.mark.parametrize(("programs", "mask"), swept(SHARED_BY, lambda case: [case] * (case in USUAL)), ids=str)
def test_any_number_of_programs_share_the_work(programs: int, mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Borders in the middle of tiles, at their ends, many in one, and more programs than blocks."""
    from rooftile.exact.backends.triton import paged_decode

    monkeypatch.setattr(paged_decode, "_programs", lambda *_: programs)
    held = sequences((0, 1, 300, 33, 64, 700))
    q, sinks = torch.randn(len(held), 2, 4, 16), torch.randn(4)
    found = rt.attention_paged_with_lse(q, paged(held, 16), mask, sinks=sinks, backend="triton")
    torch.testing.assert_close(found, rt.attention_paged_with_lse(q, paged(held, 16), mask, sinks=sinks, backend="eager"))
