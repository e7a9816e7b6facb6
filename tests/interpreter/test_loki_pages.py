"""Loki on a paged cache, interpreted: the kernels choose and read what plain operations do."""

from __future__ import annotations

import pytest
import torch

from rooftile.approximate.loki import decoding as paged
from rooftile.exact.spec import CallSettings
from rooftile.kvcache import Pages
from rooftile.kvcache.operators import write, write_as_defined
from rooftile.runtime import launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# block size, key heads, heads of a group, head dim, leading dims
SHAPES = [(16, 2, 3, 16, 5), (8, 1, 4, 24, 16), (256, 2, 1, 16, 3), (16, 1, 17, 32, 32)]


def cache_of(size: int, Hk: int, D: int, r: int, N: int = 6) -> tuple[Pages, torch.Tensor, torch.Tensor]:
    """A cache of random numbers in two layers, and block tables of four sequences; one is empty, the others end anywhere."""
    torch.manual_seed(size + D)
    pages = Pages(40, 2, Hk, D, block_size=size, dtype=torch.float32)
    pages.add_plane("leading", 2, size, Hk, r).normal_()
    pages.storage.normal_()
    table = torch.randperm(40)[: 4 * N].view(4, N).int()
    # entries past a sequence's end name no block
    table[1, 2:], table[3] = 10**6, -7
    return pages, table, torch.tensor([N * size - 3, size + 1, 3 * size, 0]).int()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("size", "Hk", "G", "D", "r"), SHAPES)
def test_pages_have_the_scores_of_the_definition(size: int, Hk: int, G: int, D: int, r: int, softcap: float | None) -> None:
    pages, table, lengths = cache_of(size, Hk, D, r)
    leading = pages.planes["leading"][:, 1]
    # a NaN past the end of a sequence is read by nobody
    leading[table[0, -1].item(), size - 2 :] = torch.nan
    # as a projection leaves them: heads side by side, tokens apart
    q = torch.randn(4, (Hk * G + 2) * D)[:, : Hk * G * D].view(4, Hk * G, D)
    found = paged.page_scores(q, leading, table, lengths, scale=0.7, softcap=softcap)
    due = paged.scores_as_defined(q, leading, table, lengths, 0.7, softcap)
    torch.testing.assert_close(found, due, atol=1e-5, rtol=1e-5)
    assert (found[3] == 0).all()
    torch.testing.assert_close(found[:3].sum(-1), torch.full((3, Hk), float(G)))


def test_scores_of_pages_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.approximate.loki import decoding_kernels as kernels

    monkeypatch.setattr(kernels, "PAGES", 2)
    kernels.shares_of.cache_clear()
    try:
        test_pages_have_the_scores_of_the_definition(16, 2, 3, 16, 5, None)
    finally:
        kernels.shares_of.cache_clear()


@pytest.mark.parametrize("scores", ["random", "equal", "ties", "signs", "nan"])
@pytest.mark.parametrize("keep", [0.01, 0.3, 1.0])
def test_the_best_pages_are_those_of_the_definition(keep: float, scores: str) -> None:
    torch.manual_seed(3)
    Hk, N, size = 3, 37, 8
    # one sequence is empty, one has one key, one ends with its page, one fills the table
    lengths = torch.tensor([N * size - 3, 0, 1, 5 * size, N * size]).int()
    x = torch.randn(len(lengths), Hk, N)
    x = {"random": x.abs(), "equal": x * 0, "ties": (3 * x).round(), "signs": x, "nan": x}[scores]
    if scores == "nan":
        x[0, 1, 4], x[0, 2, :2], x[3, 0, 2] = torch.nan, torch.inf, -torch.inf
    counts, pages = paged.counts_of(lengths, size, keep)
    most = max(int(counts.max()), 1)
    due = paged.chosen_as_defined(x, counts, pages, most)
    seen: list[str] = []
    with launch.observe(seen.append):
        found, keys = paged.choose(x, lengths, size=size, keep=keep)
    assert seen == ["_choose"]
    assert torch.equal(found[..., :most], due)
    assert (found[..., most:] == N).all()
    # the last page is among them, and is the one that may be short
    for b, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        assert count == 0 or (found[b, :, count - 1] == -(-length // size) - 1).all() or scores == "nan"
        assert keys[b] == max(count * size - (-length % size), 0)


@pytest.mark.parametrize("keep", [0.3, 1.0])
@pytest.mark.parametrize(("size", "Hk", "G", "D", "r"), SHAPES[:2])
def test_chosen_pages_are_read_where_they_lie(size: int, Hk: int, G: int, D: int, r: int, keep: float) -> None:
    pages, table, lengths = cache_of(size, Hk, D, r)
    q, cache = torch.randn(4, Hk * G, D), pages.view(1, table, lengths)
    found, due = (
        paged.decode(q, cache, pages.planes["leading"][:, 1], keep=keep, settings=CallSettings(0.3, None, backend=backend))
        for backend in ("triton", "eager")
    )
    torch.testing.assert_close(found, due)


def test_chosen_pages_are_not_copied() -> None:
    pages, table, lengths = cache_of(16, 2, 16, 5)
    leading, q, seen = pages.planes["leading"][:, 1], torch.randn(4, 4, 16), list[str]()
    with launch.observe(seen.append):
        paged.decode(q, pages.view(1, table, lengths), leading, keep=0.3, settings=CallSettings(0.3, backend="triton"))
    assert seen == ["_page_sums", "_page_shares", "_choose", "_decode", "_merge"]


def test_leading_dims_are_written_by_the_kernel_of_the_cache() -> None:
    plane = torch.zeros(4, 3, 16, 2, 5)
    k = torch.randn(37, 2, 24)[..., :5]
    slots = torch.randperm(64)[:37]
    slots[4] = -1
    due = plane.clone()
    write_as_defined(k, k, due[:, 1], due[:, 1], slots, None, None, None, None)
    write(k, k, plane[:, 1], plane[:, 1], slots, None)
    assert torch.equal(plane, due)
    assert plane.any()
