"""The checks of the arguments of a search."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.recommend.target.arguments import FLOATS, check_heads
from rooftile.recommend.target.problem import Batch, Problem
from rooftile.recommend.target.search.problem import KINDS, Search
from rooftile.recommend.target.search.simhash import check_planes, simhash
from rooftile.runtime.arguments import check_choice, check_count, check_flag, shown

INTEGERS = (torch.int32, torch.int64)


def check_no_search(**given: Any) -> None:
    """Raises InvalidInput if an argument of a search came without `top_k`; the defaults are None."""
    for name, value in given.items():
        if value is not None:
            raise InvalidInput(f"{name} came without top_k; give top_k, how many events a candidate reads, or leave {name} out")


def check_search(
    batch: Batch, problem: Problem, M: int | None, offsets: tuple[Tensor, Tensor | None], top_k: Any, search: Any, short: Any,
    per_head: Any, search_q: Any, search_keys: Any, planes: Any, q_categories: Any, key_categories: Any,
) -> Search:  # fmt: skip
    """The search of a call whose candidates came as (B, M, ...), packed if M is None; `offsets` are the caller's cu and cu_q."""
    kind = check_choice("search", "exact" if search is None else search, KINDS)
    k = check_count("top_k", top_k)
    given, short = short, check_choice("short", "refuse" if short is None else short, ("refuse", "all"))
    if short == "refuse" and kind != "category" and M != 0:
        _check_lengths(k, *offsets)
    category = {"short": given, "search_q": search_q, "search_keys": search_keys, "per_head": per_head}
    hidden = category if kind == "category" else {}
    hidden |= {"planes": planes} if kind != "lsh" else {}
    hidden |= {} if kind == "category" else {"q_categories": q_categories, "key_categories": key_categories}
    for name, value in hidden.items():
        if value is not None:
            raise InvalidInput(f"{name} came with search={kind!r}, which does not read it; leave it out")
    per_head = True if per_head is None else check_flag("per_head", per_head)
    if kind == "category":
        q, keys = _categories(batch, M, q_categories, key_categories)
        bias = None
        per_head = False
    else:
        q, keys, bias = batch.q, batch.keys, batch.bias if kind == "exact" else None
        if search_q is not None or search_keys is not None:
            q, keys = _features(batch, M, search_q, search_keys, kind)
            bias = None
    if kind == "lsh" and q.is_floating_point():
        if planes is None:
            raise InvalidInput(f"planes is None; search='lsh' needs them: planes=simhash_planes({q.shape[2]}, bits)")
        check_planes(planes, q)
        q, keys = simhash(q, planes), simhash(keys, planes)
    elif planes is not None:
        raise InvalidInput("planes came, and search_q and search_keys are hashes already; leave planes out")
    return Search(q, keys, bias, batch.cu_q, batch.cu, k, kind, problem.scale, per_head, problem.deterministic)


def _check_lengths(k: int, cu: Tensor, cu_q: Tensor | None) -> None:
    """Checks that every user with candidates has k events, where the caller's offsets lie on the host."""
    if not cu.is_cpu or torch.compiler.is_compiling():
        return
    few = cu.diff() < k
    if cu_q is not None:
        few &= cu_q.cpu().diff() > 0
    if bool(few.any()):
        b = int(few.nonzero()[0])
        raise InvalidInput(f"top_k is {k}; user {b} has {int(cu.diff()[b])} events: short='all' reads all events of such users")


def _features(batch: Batch, M: int | None, search_q: Any, search_keys: Any, kind: str) -> tuple[Tensor, Tensor]:
    """Features or hashes for the search, (total_q, 1|H, D) and (total, Hk, D)."""
    H = batch.q.shape[1]
    dtypes = (*FLOATS, torch.int32) if kind == "lsh" else FLOATS
    for name, x, ndim in (("search_q", search_q, 3 if M is None else 4), ("search_keys", search_keys, 3)):
        due = "(total, heads, dim)" if name == "search_keys" else "(total_q, heads, dim)" if M is None else "(B, M, heads, dim)"
        if not isinstance(x, Tensor) or x.ndim != ndim or x.dtype not in dtypes or not x.shape[-1]:
            words = ", or int32 hashes of simhash" if kind == "lsh" else ""
            raise InvalidInput(f"{name} is {shown(x)}; must be floats {due}{words}, and search_q and search_keys come together")
        if x.device != batch.q.device:
            raise InvalidInput(f"{name} is on {x.device}; q is on {batch.q.device}, and all inputs must be on one device")
    if search_keys.dtype != search_q.dtype:
        raise InvalidInput(f"search_keys is {search_keys.dtype}; search_q is {search_q.dtype}, and they must share one dtype")
    q = _of_candidates("search_q", search_q, batch, M)
    if q.shape[1] not in (1, H):
        raise InvalidInput(f"search_q has {q.shape[1]} heads; must have 1, or {H} as q")
    if search_keys.shape[0] != batch.keys.shape[0]:
        raise InvalidInput(f"search_keys has {search_keys.shape[0]} rows; keys has {batch.keys.shape[0]} events")
    check_heads("search_q", q, "search_keys", search_keys)
    return q, search_keys


def _categories(batch: Batch, M: int | None, q_categories: Any, key_categories: Any) -> tuple[Tensor, Tensor]:
    """Categories as (total_q, 1, 1) and (total, 1, 1) int64."""
    for name, x, ndim in (("q_categories", q_categories, 1 if M is None else 2), ("key_categories", key_categories, 1)):
        due = "(total,)" if name == "key_categories" else "(total_q,)" if M is None else "(B, M)"
        if not isinstance(x, Tensor) or x.ndim != ndim or x.dtype not in INTEGERS:
            raise InvalidInput(f"{name} is {shown(x)}; search='category' needs int32 or int64 {due}")
        if x.device != batch.q.device:
            raise InvalidInput(f"{name} is on {x.device}; q is on {batch.q.device}, and all inputs must be on one device")
    if key_categories.shape[0] != batch.keys.shape[0]:
        raise InvalidInput(f"key_categories has {key_categories.shape[0]} numbers; keys has {batch.keys.shape[0]} events")
    q = _of_candidates("q_categories", q_categories, batch, M)
    return q.long()[:, None, None], key_categories.long()[:, None, None]


def _of_candidates(name: str, x: Tensor, batch: Batch, M: int | None) -> Tensor:
    """Something of each candidate as (total_q, ...)."""
    total = batch.q.shape[0]
    rows = x if M is None else x.flatten(0, 1)
    if rows.shape[0] != total or (M is not None and x.shape[1] != M):
        raise InvalidInput(f"{name} is {tuple(x.shape)}; q has {total} candidates" + ("" if M is None else f", {M} of each user"))
    return rows
