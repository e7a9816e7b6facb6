"""Layouts deal out every token once, as many to each rank; "balanced" deals out the causal pairs of documents as evenly."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL, FULL
from rooftile.parallel.layouts import LAYOUTS, count, ranges, rows_of
from rooftile.parallel.loads import UNEVEN, advice, loads, shares
from rooftile.parallel.traffic import Sequence

# the documents of `rooftile bench context-parallel`: a long one last, where zigzag's first rank has both ends
DOCUMENTS = (5000, 1, 127, 9000, 300, 4096, 1, 14_243)
LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 60), st.integers(0, 2000)), max_size=25).map(tuple)


def offsets(lengths):
    return (0, *accumulate(lengths))


def pairs_of(held, lengths):
    """The causal pairs of each rank, row by row as a reader would count them."""
    row = [place + 1 for length in lengths for place in range(length)]
    before = list(accumulate(row, initial=0))
    return [sum(before[stop] - before[start] for start, stop in parts) for parts in held]


@given(lengths=LENGTHS, ranks=st.integers(1, 17))
@example(lengths=(), ranks=2)
@example(lengths=(0, 0, 3), ranks=4)
@example(lengths=DOCUMENTS, ranks=8)
@settings(max_examples=150, deadline=None)
def test_every_token_once_and_as_many_pairs(lengths, ranks):
    cu = offsets(lengths)
    tokens, longest = cu[-1], max(lengths, default=0)
    held = ranges(tokens, ranks, "balanced", cu)
    assert list(map(count, held)) == list(map(count, ranges(tokens, ranks, "contiguous")))
    dealt = sorted(token for parts in held for start, stop in parts for token in range(start, stop))
    assert dealt == list(range(tokens))
    for parts in held:
        assert parts
        # few ranges: they rise and none goes on in the next one, and each halving adds one at most
        assert all(a[1] < b[0] for a, b in pairwise(parts))
        assert len(parts) <= 1 + (ranks - 1).bit_length()
    assert sum(start < stop for parts in held for start, stop in parts) <= 2 * ranks - 1
    found, zigzag = (pairs_of(each, lengths) for each in (held, ranges(tokens, ranks, "zigzag")))
    assert max(found) <= 1.01 * sum(found) / ranks + 2 * longest
    assert max(found) <= 1.01 * max(zigzag) + 2 * longest


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_documents_that_zigzag_deals_out_unevenly_are_even(ranks):
    cu = offsets(DOCUMENTS)
    found = Sequence(tokens=cu[-1], ranks=ranks, mask=CAUSAL, H=32, Hk=8, D=128, Dv=128, cu=cu, layout="balanced")
    share, zigzag = (loads(shares(s)) for s in (found, Sequence(**_fields(found) | {"layout": "zigzag"})))
    assert max(zigzag) > 1.2
    assert max(share) < 1.01
    # what the plan counts is what a reader counts
    by_hand = pairs_of(ranges(cu[-1], ranks, "balanced", cu), DOCUMENTS)
    assert share == pytest.approx([each * ranks / sum(by_hand) for each in by_hand])


def test_one_document_is_cut_as_zigzag_cuts_it():
    assert sorted(ranges(4096, 2, "balanced", (0, 4096))) == [((0, 1024), (3072, 4096)), ((1024, 3072),)]


def test_no_key_travels_where_whole_documents_are_even():
    cu = offsets([1024] * 8)
    s = Sequence(tokens=8192, ranks=4, mask=CAUSAL, H=4, Hk=4, D=8, Dv=8, cu=cu, layout="balanced")
    assert [share.exchange.tokens_sent for share in shares(s)] == [0] * 4


def test_a_rank_has_one_range_of_many_short_documents():
    """Many cuts are even enough, and some lie at borders of documents."""
    cu = offsets([8] * 4000)
    held = ranges(cu[-1], 8, "balanced", cu)
    assert all(start % 8 == 0 for parts in held for start, _ in parts)
    assert sum(map(len, held)) == 8


def test_rows_of_a_mesh_have_whole_halves():
    cu = offsets(DOCUMENTS)
    rows, _ = rows_of(ranges(cu[-1], 8, "balanced", cu), 4)
    found = pairs_of(rows, DOCUMENTS)
    assert max(found) < 1.01 * sum(found) / 2
    assert max(map(len, rows)) <= 2


def test_layouts_are_refused_in_a_sentence():
    with pytest.raises(InvalidInput, match="layout is 'spiral'; must be one of 'zigzag', 'contiguous', 'balanced'"):
        ranges(8, 2, "spiral")
    with pytest.raises(InvalidInput, match=r"layout is 'balanced' without packed documents; .*'zigzag', which is even for one"):
        ranges(8, 2, "balanced")


def test_advice_names_the_layout_where_zigzag_is_uneven():
    cu = offsets(DOCUMENTS)
    uneven = Sequence(tokens=cu[-1], ranks=2, mask=CAUSAL, H=32, Hk=8, D=128, Dv=128, cu=cu)
    assert advice(uneven) == (
        "; rank 0 has 1.23 times its share of the documents' pairs, with layout='balanced' the busiest has 1.00 times"
    )
    grid = Sequence(**_fields(uneven) | {"ranks": 4, "inner": 2})
    assert advice(grid).startswith("; row 0 has 1.23 times")
    even = offsets([100, 120, 90, 110] * 20)
    silent = [{"layout": layout} for layout in LAYOUTS[1:]]
    silent += [{"cu": None}, {"cu": even, "tokens": even[-1]}, {"ranks": 1}]
    assert [advice(Sequence(**_fields(uneven) | change)) for change in silent] == [""] * len(silent)
    # under FULL a token has its whole document's pairs wherever it lies: here the other layout is no better
    cu = offsets((100, 300, 10))
    full = Sequence(**_fields(uneven) | {"mask": FULL, "cu": cu, "tokens": cu[-1]})
    assert max(loads(shares(full))) > UNEVEN
    assert advice(full) == ""


def _fields(s):
    return {name: getattr(s, name) for name in s.__slots__}
