"""TMA descriptors of pages: their boxes contain the pages, in any memory layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.exact.backends.hopper.device.config import swizzled_layout
from rooftile.exact.backends.hopper.tma import are_readable, box_of_pages, of_pages, steps_of_pages

GUARD = -7


def lying(how: str, pages: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Pages (pages, size, heads, dim) in one of the usual ways in memory, a guard around; their numbers repeat after 127."""
    if how == "tokens first":
        whole = torch.full((pages, size, heads, dim), GUARD, dtype=dtype)
        x = whole
    elif how == "heads first":
        whole = torch.full((pages, heads, size, dim), GUARD, dtype=dtype)
        x = whole.transpose(1, 2)
    elif how == "all layers":
        whole = torch.full((pages, 3, 2, size, heads, dim), GUARD, dtype=dtype)
        x = whole[:, 1, 1]
    else:
        whole = torch.full((pages, size, heads, 2 * dim), GUARD, dtype=dtype)
        x = whole[..., dim:]
    x.copy_((torch.arange(x.numel()) % 127).view(x.shape))
    return x


def copied(x: Tensor, described, at: list[int]) -> Tensor:
    """The box at a place, as the copy engine copies it: zeros outside of what is described."""
    box = torch.zeros(described.block_shape, dtype=x.dtype)
    places = torch.cartesian_prod(*(torch.arange(n) for n in described.block_shape)) + torch.tensor(at)
    inside = ((places >= 0) & (places < torch.tensor(described.shape))).all(1)
    offsets = (places * torch.tensor(described.strides)).sum(1)[inside] + x.storage_offset()
    box.view(-1)[inside] = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)[offsets]
    return box


@pytest.mark.parametrize("how", ["tokens first", "heads first", "all layers", "keys beside values"])
@pytest.mark.parametrize(
    ("pages", "size", "heads", "dim"), [(3, 16, 4, 128), (1, 16, 1, 128), (2, 64, 3, 64), (3, 32, 2, 96), (1, 16, 2, 256)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_a_box_holds_what_the_page_does(how: str, pages: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    x = lying(how, pages, size, heads, dim, dtype)
    assert are_readable(x)
    box = box_of_pages(dim, 16, dtype)
    described = of_pages(x, box)
    page_step, head_step = steps_of_pages(x)
    _, lines, _, line = box
    for page in range(pages):
        for place in range(0, size, 16):
            for head in range(heads):
                rows = torch.zeros(16, -(-dim // (lines * line)) * lines * line, dtype=dtype)
                for column in range(0, rows.shape[1], lines * line):
                    got = copied(x, described, [page * page_step + place // 8, head * head_step, 0, column])
                    # shared memory: eight rows, line by line, and then the next eight
                    rows[:, column : column + lines * line] = got.transpose(1, 2).reshape(16, lines * line)
                assert torch.equal(rows[:, :dim], x[page, place : place + 16, head])
                assert not rows[:, dim:].any()
    assert not copied(x, described, [-page_step, 0, 0, 0]).any(), "page -1 is nobody's"


def test_pages_at_odd_distances_are_not_read_in_place() -> None:
    storage = torch.zeros(2 * (16 * 4 * 128 + 64))
    apart = torch.as_strided(storage, (2, 16, 4, 128), (16 * 4 * 128 + 64, 4 * 128, 128, 1))
    assert not are_readable(apart)
    assert are_readable(apart[:1]), "one page is not apart from any"
    heads = torch.as_strided(storage, (2, 16, 2, 128), (16 * 4 * 128, 4 * 128, 128 + 16, 1))
    assert not are_readable(heads)


@pytest.mark.parametrize(("rows", "columns"), [(128, 128), (64, 128), (64, 256)])
def test_products_read_a_block_as_its_boxes_leave_it(rows: int, columns: int) -> None:
    """The layout matches the TMA swizzle: within a line of 128 bytes, 16-byte chunk c is at c XOR the line's number."""
    layout = swizzled_layout(rows, columns)
    assert 1 << len(layout.offset_bases) == rows * columns
    for row in range(rows):
        for column in range(columns):
            eight, token, line = row // 8, row % 8, column // 64
            place = ((eight * (columns // 64) + line) * 8 + token) * 64 + (column % 64 // 8 ^ token) * 8 + column % 8
            at = [0, 0]
            for bit, basis in enumerate(layout.offset_bases):
                if place >> bit & 1:
                    at = [a ^ b for a, b in zip(at, basis, strict=True)]
            assert at == [row, column]
