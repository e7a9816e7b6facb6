"""Writing and copying pages on a GPU: what the plain operations do on a CPU."""

from __future__ import annotations

import pytest
import torch

from rooftile.kvcache import Copy, Pages, Rotation, rotate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("heads", "dim", "turned", "total"), [(8, 128, 128, 1000), (1, 64, 64, 3), (3, 80, 32, 77), (8, 64, 0, 1)]
)
def test_tokens_go_to_their_slots(heads: int, dim: int, turned: int, total: int) -> None:
    pages = [Pages(128, layers=3, heads=heads, dim=dim, device=device) for device in ("cpu", "cuda")]
    for x in pages:
        x.storage.zero_()
    q, k, v = torch.randn(total, 4 * heads * dim).bfloat16().split([2 * heads * dim, heads * dim, heads * dim], 1)
    q, k, v = (x.unflatten(1, (-1, dim)) for x in (q, k, v))
    slots = torch.randperm(128 * 16)[:total]
    slots[total // 2 :: 7] = -1
    angles = torch.rand(total, turned // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin()) if turned else None
    there = None if rotation is None else Rotation(*(x.cuda() for x in rotation))
    pages[0].write(1, k, v, slots, rotation)
    pages[1].write(1, k.cuda(), v.cuda(), slots.cuda(), there)
    torch.testing.assert_close(pages[1].storage.cpu(), pages[0].storage)
    if rotation is not None and there is not None:
        torch.testing.assert_close(rotate(q.cuda(), there).cpu(), rotate(q, rotation))


def test_blocks_are_copied_whole() -> None:
    pages = Pages(300, layers=4, heads=8, dim=128, device="cuda")
    pages.storage.normal_()
    due = pages.storage.clone()
    order = torch.randperm(300).tolist()
    copies = [Copy(*pair) for pair in zip(order[:100], order[100:200], strict=True)]
    for source, target in copies:
        due[target] = due[source]
    pages.copy(copies)
    assert torch.equal(pages.storage, due)
    # a chain goes one after the other
    pages.copy([Copy(0, 1), Copy(1, 2)])
    assert torch.equal(pages.storage[2], pages.storage[0])
