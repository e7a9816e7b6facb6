"""The tensors of a call of HSTU attention over pages."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rooftile.kvcache import PagedKV


class Pages(NamedTuple):
    """The tensors of a call beside queries. What is absent is None."""

    cache: PagedKV
    own_k: Tensor | None = None  # (total, H, D) of candidates, which are in no page
    own_v: Tensor | None = None  # (total, H, Dv)
    position_table: Tensor | None = None  # (1|H, P)
    time_table: Tensor | None = None  # (1|H, M)
    edges: Tensor | None = None  # (M - 1,)
    row_times: Tensor | None = None  # (total,)
    key_times: Tensor | None = None  # (blocks, size)

    @property
    def cu(self) -> Tensor:
        """Offsets (B + 1,) of the rows."""
        assert self.cache.cu_q is not None
        return self.cache.cu_q
