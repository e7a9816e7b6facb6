"""The dropout generator is Philox4x32-10, and its mask depends only on position and seed."""

from __future__ import annotations

import pytest
import torch

from rooftile.exact.reference.philox import keep_mask, threshold

MASK = 0xFFFFFFFF

# counter (4 words), key (2 words), answer (4 words): known answers, published with Random123
ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Computes Philox4x32-10 in Python integers, written from the paper, independently of rooftile."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for n in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        r0, r1 = (k0 + n * 0x9E3779B9) & MASK, (k1 + n * 0xBB67AE85) & MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ r0, low1, high0 ^ c3 ^ r1, low0
    return [c0, c1, c2, c3]


def signed(high: int, low: int) -> int:
    """Combines two words into one int64, as in a seed."""
    value = high << 32 | low
    return value - (1 << 64) if value >> 63 else value


def first_word(counter: list[int], key: list[int]) -> int:
    """Finds the 32 random bits of a weight by bisection: a weight is kept exactly if they reach the threshold."""
    seed = torch.tensor([signed(key[1], key[0])])
    column, row, head, batch = (torch.tensor(word) for word in counter)
    low, high = 0, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        # middle / 2^32 is exact in a double, so the threshold is `middle` itself
        kept = keep_mask(seed, middle / 2**32, batch, head, row, column).item()
        low, high = (middle, high) if kept else (low, middle)
    return low


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    assert philox(words(counter), words(key)) == words(answer)
    assert first_word(words(counter), words(key)) == words(answer)[0]


def test_the_counter_is_column_row_head_batch_and_the_key_is_the_seed() -> None:
    dropout, seed = 0.3, -0x1234_5678_9ABC_DEF1
    key = [seed & MASK, (seed >> 32) & MASK]
    places = [(0, 1, 2, 3), (3, 2, 1, 0), (7, 0, 1000, 70000), (0, 0, 0, 0)]
    for batch, head, row, column in places:
        bits = philox([column, row, head, batch], key)[0]
        index = (torch.tensor(n) for n in (batch, head, row, column))
        assert keep_mask(torch.tensor([seed]), dropout, *index).item() == (bits >= dropout * 2**32)


@pytest.mark.parametrize("dropout", [0.05, 0.5, 0.9])
def test_drops_as_often_as_asked_everywhere(dropout: float) -> None:
    batch, head, row, column = torch.meshgrid(*(torch.arange(n) for n in (3, 4, 100, 200)), indexing="ij")
    kept = keep_mask(torch.tensor([11]), dropout, batch, head, row, column)
    dropped = (~kept).double()
    # five standard deviations of a mean of n independent draws
    for means, n in ((dropped.mean(), kept.numel()), (dropped.mean((0, 1, 3)), 2400), (dropped.mean((0, 1, 2)), 1200)):
        assert (means - dropout).abs().max().item() < 5 * (dropout * (1 - dropout) / n) ** 0.5


def test_another_seed_and_another_head_draw_other_masks() -> None:
    row, column = torch.arange(64)[:, None], torch.arange(64)
    zero, one = torch.tensor(0), torch.tensor(1)
    first = keep_mask(torch.tensor([1]), 0.5, zero, zero, row, column)
    for seed, batch, head in ((2, zero, zero), (1, one, zero), (1, zero, one), (1 + (1 << 32), zero, zero)):
        other = keep_mask(torch.tensor([seed]), 0.5, batch, head, row, column)
        assert 0.45 < (first == other).double().mean().item() < 0.55


def test_threshold_is_a_probability_of_32_bits() -> None:
    assert [threshold(p) for p in (0.0, 0.5, 0.25, 1 - 1e-12)] == [0, 1 << 31, 1 << 30, MASK]
