"""The operator of a search, and what runs it. A choice has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.recommend.target.search import plain
from rooftile.recommend.target.search.problem import Search
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import call, define


def search(given: Search, backend: str) -> Tensor:
    """Returns the events that are chosen, (total_q, 1|H, k) int32: places in the user's history, the best first, -1 for none."""
    tensors = (x if x is None else x.detach() for x in given[:5])
    run = _SEARCH if given.q.is_meta else _run
    found: Tensor = call(_SEARCH, run, *tensors, *given[5:], backend)
    return found


def _run(*arguments: Any) -> Tensor:
    search = Search(*arguments[:-1])
    with torch.no_grad(), device_of(search.q), torch.autocast(search.q.device.type, enabled=False):
        return plain.search(search)


def _fake(*arguments: Any) -> Tensor:
    search = Search(*arguments[:-1])
    return search.q.new_empty((search.q.shape[0], search.heads, search.k), dtype=torch.int32)


_SEARCH = define(
    "target_search(Tensor q, Tensor keys, Tensor? bias, Tensor cu_q, Tensor cu, int k, str kind, float scale, bool per_head, "
    "bool deterministic, str backend) -> Tensor",
    _run, _fake,
)  # fmt: skip
