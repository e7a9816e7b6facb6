"""The kernels that write and copy pages, interpreted: what the plain operations do."""

from __future__ import annotations

import pytest
import torch

from rooftile.fused.rope import rotate, rotated_as_defined
from rooftile.kvcache import Copy, Pages, Rotation
from rooftile.kvcache.operators import PAST, write_as_defined
from tests.unit.test_paged import in_fp8, paged, sequences


@pytest.mark.parametrize(("heads", "dim", "turned"), [(2, 16, 16), (3, 24, 8), (1, 64, 0), (8, 128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8], ids=str)
def test_tokens_go_to_their_slots(heads: int, dim: int, turned: int, dtype: torch.dtype) -> None:
    total = 37
    qkv = torch.randn(total, (2 + 2 * heads) * dim)
    # as a projection leaves them: the heads of a token side by side, tokens apart
    k, v = (x.view(total, heads, dim) for x in (qkv[:, 2 * dim : (2 + heads) * dim], qkv[:, (2 + heads) * dim :]))
    slots = torch.randperm(4 * 16)[:total]
    slots[5] = slots[20] = -1
    angles = torch.rand(total, turned // 2) * 6
    rotation = Rotation(angles.cos(), angles.sin()) if turned else None
    pages, due = (Pages(4, layers=3, heads=heads, dim=dim, dtype=dtype) for _ in range(2))
    k[7, 0] = 0
    for x in (pages, due):
        x.storage.view(torch.uint8).zero_()
        if x.scales is not None:
            x.scales.zero_()
    pages.write(1, k, v, slots, rotation)
    scales = (None, None) if due.scales is None else due.scales[:, 1].unbind(1)
    write_as_defined(k, v, *due.layer(1), slots, *(rotation or (None, None)), *scales)
    torch.testing.assert_close(pages.storage.float(), due.storage.float())
    torch.testing.assert_close(pages.scales, due.scales)
    if rotation is not None:
        torch.testing.assert_close(rotate(k, rotation), rotated_as_defined(k, rotation))


def test_blocks_are_copied_whole() -> None:
    pages = Pages(9, layers=3, heads=2, dim=24, block_size=8, dtype=torch.bfloat16)
    pages.storage.normal_()
    due = pages.storage.clone()
    due[[7, 2]] = due[[1, 0]]
    pages.copy([Copy(1, 7), Copy(0, 2)])
    assert torch.equal(pages.storage, due)


@pytest.mark.parametrize(("D", "Dv", "size"), [(16, 16, 16), (24, 40, 8)])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_a_cache_is_gathered(D: int, Dv: int, size: int, fp8: bool) -> None:
    cache = paged(sequences((0, 70, 16, 1, 0), Hk=3, D=D, Dv=Dv), size)
    if fp8:
        cache, _ = in_fp8(cache)
    k, v, cu_k = cache.gathered_with_room(torch.float32)
    due_k, due_v, due_cu = cache.gathered(torch.float32)
    total = int(due_cu[-1])
    assert torch.equal(cu_k.long(), due_cu)
    assert torch.equal(k[:total], due_k)
    assert torch.equal(v[:total], due_v)
    # a tile of keys may reach past the last sequence
    assert not k[total : total + PAST].any()
    assert not v[total : total + PAST].any()
