"""Masks as intervals, compared with their definitions pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftile import Precision, quantise_qkv
from rooftile.errors import InvalidInput
from rooftile.exact import masks
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window
from rooftile.kvcache import PagedKV

# the conditions of the docstrings: (name, numbers) -> whether position i sees key j
CONDITIONS = {
    "full": lambda i, j: True,
    "causal": lambda i, j: j <= i,
    "window": lambda i, j, left, right: (left is None or i - left <= j) and (right is None or j <= i + right),
    "prefix": lambda i, j, n: j < n or j <= i,
    "chunk": lambda i, j, n: j // n == i // n,
}
MAKERS = {"full": FULL, "causal": CAUSAL, "window": Window, "prefix": Prefix, "chunk": Chunk}

side = st.none() | st.integers(0, 12)
condition = st.one_of(
    st.just(("full",)),
    st.just(("causal",)),
    st.tuples(st.just("window"), side, side),
    st.tuples(st.just("prefix"), st.integers(0, 15)),
    st.tuples(st.just("chunk"), st.integers(1, 9)),
)
conditions = st.lists(condition, min_size=1, max_size=4)
length = st.integers(0, 14)


def build(parts: list[tuple]) -> Mask:
    mask = FULL
    for name, *numbers in parts:
        mask = mask & (MAKERS[name](*numbers) if numbers else MAKERS[name])
    return mask


def brute(parts: list[tuple], T: int, S: int) -> list[list[bool]]:
    """Evaluates the definition pair by pair: query t has position t + S - T."""
    return [[all(CONDITIONS[name](t + S - T, j, *numbers) for name, *numbers in parts) for j in range(S)] for t in range(T)]


@given(conditions, length, length)
def test_every_view_of_a_mask_agrees_with_its_definition(parts: list[tuple], T: int, S: int) -> None:
    mask, due = build(parts), brute(parts, T, S)
    assert masks.materialise(mask, T, S).tolist() == due
    assert masks.pairs(mask, T, S) == sum(map(sum, due))
    drawn = ["".join("#" if seen else "." for seen in row) for row in due]
    assert masks.draw(mask, T, S).split("\n") == (drawn or [""])
    for t, row in enumerate(due):
        start, stop = masks.visible(mask, t, T, S)
        assert row == [start <= j < stop for j in range(S)]
        assert 0 <= start <= stop <= max(S, start)


@given(conditions, st.integers(-20, 20), st.integers(0, 20))
def test_the_ends_of_the_intervals(parts: list[tuple], i: int, j: int) -> None:
    mask = build(parts)
    sees = all(CONDITIONS[name](i, j, *numbers) for name, *numbers in parts)
    assert (mask.first_key(i) <= j <= mask.last_key(i)) == sees
    # the two ends rise with the position, so the queries of a key are an interval too
    assert (mask.first_query(j) <= i <= mask.last_query(j)) == sees
    assert mask.first_key(i) <= mask.first_key(i + 1)
    assert mask.last_key(i) <= mask.last_key(i + 1)


@given(conditions, st.integers(-20, 20))
def test_tensors_of_positions_give_what_numbers_give(parts: list[tuple], i: int) -> None:
    mask = build(parts)
    for end in (mask.first_key, mask.last_key):
        assert end(torch.tensor([i, i + 1])).tolist() == [end(i), end(i + 1)]


@given(conditions, length, length, st.data())
def test_ranges_of_tiles(parts: list[tuple], T: int, S: int, data: st.DataObject) -> None:
    mask, due = build(parts), brute(parts, T, S)
    t_start, t_stop = sorted(data.draw(st.tuples(st.integers(0, T), st.integers(0, T))))
    s_start, s_stop = sorted(data.draw(st.tuples(st.integers(0, S), st.integers(0, S))))

    start, stop = masks.key_range(mask, t_start, t_stop, T, S)
    seen = {j for t in range(t_start, t_stop) for j in range(S) if due[t][j]}
    assert seen <= set(range(start, stop))
    assert not seen or (min(seen), max(seen)) == (start, stop - 1), "the range is wider than it need be"

    start, stop = masks.query_range(mask, s_start, s_stop, T, S)
    seen = {t for j in range(s_start, s_stop) for t in range(T) if due[t][j]}
    assert seen <= set(range(start, stop))
    assert not seen or (min(seen), max(seen)) == (start, stop - 1), "the range is wider than it need be"

    if t_start < t_stop and s_start < s_stop:
        whole = all(due[t][j] for t in range(t_start, t_stop) for j in range(s_start, s_stop))
        assert masks.sees_all(mask, t_start, t_stop, s_start, s_stop, T, S) == whole


@given(conditions)
def test_the_order_of_an_intersection_does_not_matter(parts: list[tuple]) -> None:
    assert build(parts) == build(parts[::-1]) == build(parts + parts)
    assert hash(build(parts)) == hash(build(parts[::-1]))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (CAUSAL & FULL, CAUSAL),
        (CAUSAL & CAUSAL, CAUSAL),
        (Window(None, 0), CAUSAL),
        (Window(None), FULL),
        (Window(5) & Window(3, 9), Window(3, 9)),
        (CAUSAL & Window(4), Window(4, 0)),
        (CAUSAL & Prefix(8), CAUSAL),
        (Prefix(0), CAUSAL),
        (Prefix(3) & Prefix(9), Prefix(3)),
        (Chunk(4) & Chunk(8), Chunk(4)),
        (Chunk(6) & Chunk(4) & Chunk(2), Chunk(2)),
        (Window(1 << 40), FULL),
    ],
)
def test_masks_that_say_the_same_are_equal(left: Mask, right: Mask) -> None:
    assert left == right


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (FULL, "full"),
        (CAUSAL, "causal"),
        (Window(3), "window(3, None)"),
        (Window(None, 2), "window(None, 2)"),
        (CAUSAL & Window(1024), "causal & window(1024)"),
        (Prefix(7), "prefix(7)"),
        (Chunk(64) & CAUSAL, "causal & chunk(64)"),
        (Chunk(6) & Chunk(4), "chunk(4) & chunk(6)"),
        (Prefix(5) & Window(7, 9), "window(7, 9) & prefix(5)"),
    ],
)
def test_masks_print_as_what_they_are(mask: Mask, text: str) -> None:
    assert str(mask) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(-1), "Window: left is -1; must be an integer of at least 0, or None for no bound"),
        (lambda: Window(2, -3), "Window: right is -3; must be an integer of at least 0, or None for no bound"),
        (lambda: Window(1.5), "Window: left is 1.5; must be an integer of at least 0, or None for no bound"),
        (lambda: Window(True), "Window: left is True; must be an integer of at least 0, or None for no bound"),
        (lambda: Prefix(-1), "Prefix: n is -1; must be an integer of at least 0"),
        (lambda: Prefix(None), "Prefix: n is None; must be an integer of at least 0"),
        (lambda: Chunk(0), "Chunk: n is 0; must be an integer of at least 1"),
        (lambda: Chunk("8"), "Chunk: n is '8'; must be an integer of at least 1"),
    ],
)
def test_bad_masks(make, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        make()
    assert str(raised.value) == message


def test_a_mask_joins_only_with_a_mask() -> None:
    with pytest.raises(TypeError):
        CAUSAL & "window"


def test_pairs_of_a_long_mask_cost_no_matrix() -> None:
    N, window = 1 << 20, 1 << 10
    assert masks.pairs(CAUSAL, N, N) == N * (N + 1) // 2
    assert masks.pairs(CAUSAL & Window(window), N, N) == N * (window + 1) - window * (window + 1) // 2


@pytest.mark.parametrize("number", [np.int64(4), np.int32(4), np.uint8(4), torch.tensor(4), torch.tensor([4])], ids=repr)
def test_integers_of_numpy_and_of_a_tensor_are_integers(number: Any) -> None:
    for made, due in ((Window(number, number), Window(4, 4)), (Prefix(number), Prefix(4)), (Chunk(number), Chunk(4))):
        assert made == due
        assert all(type(n) is int for n in (made.left, made.prefix, *made.chunks) if n is not None)


@pytest.mark.parametrize("number", [np.float64(4), np.bool_(True), torch.tensor(4.0), torch.tensor(True), torch.tensor([1, 2])])
def test_other_numbers_are_not(number: Any) -> None:
    with pytest.raises(InvalidInput, match="must be an integer of at least 0"):
        Window(number)


@given(st.lists(condition, max_size=4))
def test_the_repr_of_a_mask_is_the_expression_that_makes_it(parts) -> None:
    mask = build(parts)
    names = {"FULL": FULL, "CAUSAL": CAUSAL, "Window": Window, "Prefix": Prefix, "Chunk": Chunk}
    assert eval(repr(mask), names) == mask


def test_reprs_are_short() -> None:
    assert repr(CAUSAL & Window(4)) == "CAUSAL & Window(4)"
    assert repr(Chunk(8) & Window(None, 2)) == "Window(None, 2) & Chunk(8)"
    assert repr(FULL) == "FULL"
    assert repr(Precision(qk="int8", smooth_k=False)) == "Precision(qk='int8', smooth_k=False)"
    x = torch.randn(1, 40, 2, 64)
    due = "QuantisedQKV(q (1, 40, 2, 64), k (1, 40, 2, 64), v (1, 40, 2, 64), int8, "
    assert repr(quantise_qkv(x, x, x, "int8")).startswith(due)
    cache = PagedKV(torch.zeros(6, 16, 2, 64), torch.zeros(6, 16, 2, 64), torch.zeros(3, 2), torch.zeros(3))
    assert repr(cache) == "PagedKV(3 sequences in 6 blocks of 16 tokens, 2 heads of 64, float32)"
