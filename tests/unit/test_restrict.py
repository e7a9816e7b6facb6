"""Pieces of a mask: together they show each visible pair once, and no other, whatever the mask and the range of queries."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window, materialise
from rooftile.exact.restrict import over_keys, restrict, restrict_packed

SIDES = st.one_of(st.none(), st.integers(0, 20))
CHUNKS = st.builds(Chunk, st.integers(1, 12))
ANY = st.lists(
    st.one_of(st.just(FULL), st.just(CAUSAL), st.builds(Window, SIDES, SIDES), st.builds(Prefix, st.integers(0, 24)), CHUNKS),
    min_size=1, max_size=3,
)  # fmt: skip
# chunks under a causal mask keep their form, from the first key of a chunk on: a case that ANY seldom draws
KEPT = st.tuples(st.just(CAUSAL), CHUNKS, st.one_of(CHUNKS, st.builds(Window, SIDES, st.just(0)))).map(list)
MASKS = st.one_of(ANY, KEPT)


def joined(masks: list[Mask]) -> Mask:
    found = FULL
    for mask in masks:
        found = found & mask
    return found


def counted(pieces, T: int, S: int) -> torch.Tensor:
    """How often each pair is shown."""
    found = torch.zeros(T, S, dtype=torch.int64)
    for piece in pieces:
        rows, keys = slice(piece.t_start, piece.t_stop), slice(piece.s_start, piece.s_stop)
        found[rows, keys] += materialise(piece.mask, piece.t_stop - piece.t_start, piece.s_stop - piece.s_start)
    return found


@settings(max_examples=600, deadline=None)
@given(MASKS, st.integers(0, 40), st.integers(0, 40), st.data())
def test_pieces_show_each_visible_pair_once(masks, T, S, data):
    mask = joined(masks)
    a = data.draw(st.integers(0, T))
    b = data.draw(st.integers(a, T))
    pieces = restrict(mask, a, b, T, S)
    due = torch.zeros(T, S, dtype=torch.int64)
    due[a:b] = materialise(mask, T, S)[a:b].long()
    assert torch.equal(counted(pieces, T, S), due)
    assert [piece.t_start for piece in pieces[1:]] == [piece.t_stop for piece in pieces[:-1]]
    assert not pieces or (pieces[0].t_start, pieces[-1].t_stop) == (a, b)
    assert all(0 <= piece.s_start <= piece.s_stop <= S for piece in pieces)


@settings(max_examples=600, deadline=None)
@given(st.builds(Window, SIDES, SIDES), st.one_of(st.just(FULL), st.builds(Prefix, st.integers(0, 24))), st.data())
def test_ranges_of_keys_show_each_visible_pair_once(window, other, data):
    mask = window & other
    T, S = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    a = data.draw(st.integers(0, T - 1))
    b = data.draw(st.integers(a + 1, T))
    cuts = sorted({0, S, *data.draw(st.lists(st.integers(0, S), max_size=4))})
    parts = [
        part
        for piece in restrict(mask, a, b, T, S)
        for low, high in itertools.pairwise(cuts)
        if (part := over_keys(piece, low, high)) is not None
    ]
    due = torch.zeros(T, S, dtype=torch.int64)
    due[a:b] = materialise(mask, T, S)[a:b].long()
    assert torch.equal(counted(parts, T, S), due)


@settings(max_examples=300, deadline=None)
@given(MASKS, st.lists(st.integers(0, 17), max_size=6), st.data())
def test_pieces_of_a_pack_show_each_visible_pair_once(masks, lengths, data):
    mask = joined(masks)
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    a = data.draw(st.integers(0, cu[-1]))
    b = data.draw(st.integers(a, cu[-1]))
    due = torch.zeros(cu[-1], cu[-1], dtype=torch.int64)
    for low, high in itertools.pairwise(cu):
        due[low:high, low:high] = materialise(mask, high - low, high - low).long()
    due[:a] = 0
    due[b:] = 0
    found = torch.zeros_like(due)
    for piece in restrict_packed(mask, a, b, cu):
        assert piece.cu_q[-1] == piece.t_stop - piece.t_start
        assert piece.cu_k[-1] == piece.s_stop - piece.s_start
        for (q0, q1), (k0, k1) in zip(pairs(piece.cu_q), pairs(piece.cu_k), strict=True):
            rows = slice(piece.t_start + q0, piece.t_start + q1)
            found[rows, piece.s_start + k0 : piece.s_start + k1] += materialise(piece.mask, q1 - q0, k1 - k0)
    assert torch.equal(found, due)


def pairs(cu):
    return list(itertools.pairwise(cu))


@pytest.mark.parametrize(
    ("mask", "most"),
    [(FULL, 1), (CAUSAL, 1), (Window(5), 1), (Window(5, 3), 1), (Prefix(20), 2), (Chunk(8), 2), (Chunk(8) & CAUSAL, 1)],
)
def test_few_pieces(mask, most):
    """A piece is a call, so there may be few of them."""
    assert max(len(restrict(mask, a, b, 64, 64)) for a in range(64) for b in range(a + 1, 65)) == most


def test_a_window_needs_its_own_keys_alone():
    [piece] = restrict(CAUSAL & Window(100), 5_000, 6_000, 10_000, 10_000)
    assert (piece.s_start, piece.s_stop, piece.mask) == (4_900, 6_000, CAUSAL & Window(100))


def test_whole_sequences_of_a_pack_are_one_piece():
    pieces = restrict_packed(CAUSAL, 10, 95, [0, 30, 31, 80, 100])
    assert [(piece.s_start, piece.s_stop, piece.cu_q, piece.cu_k) for piece in pieces] == [
        (0, 95, (0, 20, 21, 70, 85), (0, 30, 31, 80, 95))
    ]
