"""The operator of a search, and what runs it. A choice has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.recommend.target.search import plain
from rooftile.recommend.target.search.problem import Search
from rooftile.runtime.devices import arch, lack_of_kernels
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import call, define

# the most events that the kernel keeps: more do not fit in a program's registers
MOST_KEPT = 256


def search(given: Search, backend: str) -> Tensor:
    """Returns the events that are chosen, (total_q, 1|H, k) int32: places in the user's history, the best first, -1 for none."""
    tensors = (x if x is None else x.detach() for x in given[:5])
    run = _SEARCH if given.q.is_meta else _run
    found: Tensor = call(_SEARCH, run, *tensors, *given[5:], backend)
    return found


def _run(*arguments: Any) -> Tensor:
    given, backend = Search(*arguments[:-1]), arguments[-1]
    module: Any = plain
    if backend != "tiled" and refusal(given) is None:
        from rooftile.recommend.target.kernels.search import launch as module
    with torch.no_grad(), device_of(given.q), torch.autocast(given.q.device.type, enabled=False):
        found: Tensor = module.search(given)
        return found


def refusal(given: Search) -> str | None:
    """Says why no kernel runs such a search; None if one does."""
    if lack := lack_of_kernels(arch(given.q.device)):
        return lack
    if given.q.dtype == torch.float64:
        return "the search has float64 features; has float32, bfloat16 and float16"
    if given.k > MOST_KEPT:
        return f"top_k is {given.k}; has up to {MOST_KEPT}"
    return None


def _fake(*arguments: Any) -> Tensor:
    search = Search(*arguments[:-1])
    return search.q.new_empty((search.q.shape[0], search.heads, search.k), dtype=torch.int32)


_SEARCH = define(
    "target_search(Tensor q, Tensor keys, Tensor? bias, Tensor cu_q, Tensor cu, int k, str kind, float scale, bool per_head, "
    "bool deterministic, str backend) -> Tensor",
    _run, _fake,
)  # fmt: skip
