"""Loki on a paged cache, interpreted: the kernels choose and read what plain operations do."""

from __future__ import annotations

import pytest
import torch

from rooftile.approximate.paged import loki as paged
from rooftile.kvcache import Pages
from rooftile.kvcache.operators import write, write_as_defined
from rooftile.spec import Asked

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# block size, key heads, heads of a group, head dim, leading dims
SHAPES = [(16, 2, 3, 16, 5), (8, 1, 4, 24, 16), (256, 2, 1, 16, 3), (16, 1, 17, 32, 32)]


def cache_of(size: int, Hk: int, D: int, r: int, N: int = 6) -> tuple[Pages, torch.Tensor, torch.Tensor]:
    """A cache of random numbers in two layers, and block tables of four sequences; one is empty, the others end anywhere."""
    torch.manual_seed(size + D)
    pages = Pages(40, 2, Hk, D, size=size, dtype=torch.float32)
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


@pytest.mark.parametrize("keep", [0.3, 1.0])
@pytest.mark.parametrize(("size", "Hk", "G", "D", "r"), SHAPES[:2])
def test_chosen_pages_are_read_where_they_lie(size: int, Hk: int, G: int, D: int, r: int, keep: float) -> None:
    pages, table, lengths = cache_of(size, Hk, D, r)
    q, cache = torch.randn(4, Hk * G, D), pages.view(1, table, lengths)
    found, due = (
        paged.decode(q, cache, pages.planes["leading"][:, 1], keep=keep, asked=Asked(0.3, None, backend=backend))
        for backend in ("triton", "eager")
    )
    torch.testing.assert_close(found, due)


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
