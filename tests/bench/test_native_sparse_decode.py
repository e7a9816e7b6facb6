"""The benchmark of decoding with Native Sparse Attention: its rows on a short text."""

from __future__ import annotations

import pytest
import torch

from rooftile.cost.session import open_session
from rooftile_lab.bench.suites import native_sparse_decode


class Once:
    """A clock that runs each work, and says that it took a microsecond per element of nothing."""

    def samples(self, work) -> list[float]:
        work()
        return [4.0]


def test_rows_count_bytes_and_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(torch.device("cpu"))
    rows = {row.backend: row for row in native_sparse_decode.decode(session, Once(), "tiny", 2, 1100, 16, 1)}
    assert set(rows) == {"native sparse", "rooftile, block 16"}
    sparse, exact = (rows[name].measures for name in ("native sparse", "rooftile, block 16"))
    # 67 compressed keys, 15 blocks of 64 and 12 tokens of the last, and a window of 512, keys and values of 128 in 2 bytes
    seen = 67 + 15 * 64 + 12 + 512
    assert sparse["compulsory_bytes"] == pytest.approx(2 * (seen * 256 + 16 * (256 + 3)) * 2, rel=0.01)
    assert sparse["of_exact_ratio"] == 1.0
    assert exact["compulsory_bytes"] > 2 * 1100 * 256 * 2
    assert {row.phase for row in rows.values()} == {"decode"}
