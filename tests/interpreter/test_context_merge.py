"""Merging the parts of ranks, interpreted: one launch gives what plain operations do."""

from __future__ import annotations

import pytest
import torch

from rooftile.engine.mixers.exact import merge_kernels
from rooftile.engine.mixers.exact.merging import merge_as_defined

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("ranks", "dim", "dtype"), [(2, 10, torch.float32), (4, 64, torch.bfloat16), (3, 1, torch.float32)])
def test_one_launch_merges_all_ranks(ranks: int, dim: int, dtype: torch.dtype, with_sinks: bool) -> None:
    """Lines that one rank, or none, has keys for; scores so far apart, or so large, that exp alone would end in 0 or infinity."""
    torch.manual_seed(ranks)
    parts = torch.randn(ranks, 7, 3, dim + 1)
    parts[..., -1] *= torch.tensor([1.0, 1.0, 1.0, 300.0, 1.0, 1.0, 1.0])[:, None]
    parts[:, 4, :, -1] += 200
    parts[1:, 1, :, -1] = -torch.inf
    # an empty part's o is no number
    parts[1:, 1, :, :-1] = torch.nan
    parts[:, 2, :, -1] = -torch.inf
    sinks = torch.tensor([0.5, -torch.inf, 90.0]) if with_sinks else None
    found, due = merge_kernels.merge(parts, sinks, dtype), merge_as_defined(parts, sinks, dtype)
    assert found.dtype == dtype
    assert not found[2].any()
    torch.testing.assert_close(found, due, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
