"""The kernels of single tokens' attention to latents, interpreted: what the definition in fp64 gives."""

from __future__ import annotations

import pytest
import torch

from rooftile.engine.mixers.latent import kernels
from tests.models.latent import sums_of_latents


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize(("H", "rank", "rotated", "size"), [(4, 16, 16, 16), (5, 14, 6, 8), (40, 24, 10, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_those_of_the_definition(
    H: int, rank: int, rotated: int, size: int, parts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths at the borders of blocks and parts, blocks in no order, queries with gaps, and NaN in all that is not theirs."""
    lengths = torch.tensor([1, 16, 33, 0, 100, 64], dtype=torch.int32)
    columns, B = -(-100 // size), len(lengths)
    latents = torch.full((2 * B * columns, 3, size, rank + rotated), float("nan"), dtype=dtype)[:, 1, :, None]
    table = torch.randperm(2 * B * columns)[: B * columns].view(B, columns).int()
    for blocks, length in zip(table, lengths.tolist(), strict=True):
        n = torch.arange(length)
        latents[blocks[n // size].long(), n % size, 0] = torch.randn(length, rank + rotated).to(dtype)
    q, turning = torch.randn(B, H, rank + 3).to(dtype)[..., :rank], torch.randn(B, H, rotated).to(dtype)
    monkeypatch.setattr(kernels, "parts_of", lambda *given: parts)
    found = kernels.attend(q, turning, latents, table, lengths, rotated, 0.3)
    assert (found.dtype, found.shape) == (dtype, (B, H, rank))
    due = sums_of_latents(q, turning, latents, table, lengths, 0.3)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found.double(), due, **tolerance)


def test_keys_are_cut_into_parts_for_the_processors() -> None:
    assert [kernels.parts_of(programs, 4096, 264) for programs in (1, 40, 200, 264)] == [32, 8, 2, 1]
    # neither below the least part, nor into more than a merge takes
    assert (kernels.parts_of(1, 255, 264), kernels.parts_of(1, 256, 264), kernels.parts_of(1, 1 << 20, 264)) == (1, 2, 64)
