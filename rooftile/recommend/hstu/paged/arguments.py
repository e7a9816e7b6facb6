"""The checks of a call of `hstu_attention_paged`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.validate import check_blocks
from rooftile.kvcache import PagedKV
from rooftile.kvcache.operators import LARGEST
from rooftile.recommend.hstu.arguments import with_bias
from rooftile.recommend.hstu.paged.problem import Pages
from rooftile.recommend.hstu.problem import Problem, Users
from rooftile.runtime.arguments import check_number, shown

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_call(
    q: Any, cache: Any, alpha: Any, scale: Any, mask: Any, bias: Any, times: Any, key_times: Any, candidates: Any
) -> tuple[Tensor, Pages, Problem]:
    """Returns queries, the other tensors, and the numbers."""
    if not isinstance(q, Tensor) or q.ndim != 3 or q.dtype not in FLOATS:
        raise InvalidInput(f"q is {shown(q)}; must be a float tensor (total, H, D) of users' rows one after the other")
    cu = _check_cache(q, cache)
    mask = FULL if mask is None else mask
    if not isinstance(mask, Mask):
        raise InvalidInput(f"mask is {shown(mask)}; must be a mask such as rooftile.CAUSAL, or None")
    if mask.targets:
        raise InvalidInput(f"mask is {mask!r}; rows beside pages are targets if candidates= has them: give the mask among events")
    own_k = own_v = None
    if candidates is None:
        _check_lengths(cache, cu)
    else:
        own_k, own_v = _check_candidates(q, cache, candidates)
    problem = Problem(check_number("alpha", alpha), check_number("scale", scale), mask, 0, 0)
    users, problem = with_bias(q, Users(cu), problem, bias, times, None)
    if users.time_table is not None:
        key_times = _check_key_times(key_times, cache)
    elif key_times is not None:
        raise InvalidInput("key_times came, and bias has no table of times; give RelativeBias(times=table, edges=edges)")
    given = Pages(
        cache, own_k, own_v, users.position_table, users.time_table, users.edges, users.row_times,
        key_times if users.time_table is not None else None,
    )  # fmt: skip
    return q, given, problem


def _check_cache(q: Tensor, cache: Any) -> Tensor:
    """Returns the offsets of the rows."""
    if not isinstance(cache, PagedKV) or cache.cu_q is None:
        raise InvalidInput(f"cache is {shown(cache)}; must be a rooftile.kvcache.PagedKV with offsets cu_q of the rows of q")
    scaled = cache.k_scale is not None or cache.v_scale is not None
    for name, x in (("k", cache.k), ("v", cache.v)):
        if x.ndim != 4 or x.shape[2] != q.shape[1]:
            raise InvalidInput(f"cache.{name} is {tuple(x.shape)}; must be (P, size, H, dim) with the {q.shape[1]} heads of q")
        if x.dtype not in (LARGEST if scaled else FLOATS):
            due = "with scales it must be torch.float8_e4m3fn or torch.int8" if scaled else "without scales it must be a float"
            raise InvalidInput(f"cache.{name} is {x.dtype}; {due}")
    if cache.k.dtype != cache.v.dtype:
        raise InvalidInput(f"cache.k is {cache.k.dtype} and cache.v is {cache.v.dtype}; they must agree")
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)) if scaled else ():
        if scale is None or scale.shape != cache.k.shape[:3] or scale.dtype != torch.float32:
            raise InvalidInput(f"cache.{name} is {shown(scale)}; must be torch.float32 (P, size, H) = {tuple(cache.k.shape[:3])}")
    check_blocks(q, cache)
    return cache.cu_q


def _check_lengths(cache: PagedKV, cu: Tensor) -> None:
    """Checks that rows are events in the pages, where the numbers lie on the host."""
    if not cu.is_cpu or torch.compiler.is_compiling():
        return
    for user, (rows, length) in enumerate(zip(cu.diff().tolist(), cache.lengths.tolist(), strict=True)):
        if rows > length:
            raise InvalidInput(
                f"user {user} has {rows} rows and {length} events; its rows are the last of them, already in the pages, unless "
                "candidates are given"
            )


def _check_candidates(q: Tensor, cache: PagedKV, candidates: Any) -> tuple[Tensor, Tensor]:
    """The keys and values of candidates."""
    if not isinstance(candidates, (tuple, list)) or len(candidates) != 2:
        raise InvalidInput(f"candidates is {shown(candidates)}; must be a pair: keys (total, H, D) and values (total, H, Dv)")
    for name, x, due in (("keys", candidates[0], q.shape), ("values", candidates[1], (*q.shape[:2], cache.v.shape[3]))):
        if not isinstance(x, Tensor) or x.shape != due or x.dtype != q.dtype or x.device != q.device:
            raise InvalidInput(f"candidates' {name} are {shown(x)}; must be {q.dtype} {tuple(due)} on {q.device}, as q")
    return candidates[0], candidates[1]


def _check_key_times(key_times: Any, cache: PagedKV) -> Tensor:
    if not isinstance(key_times, Tensor) or key_times.dtype != torch.int64 or key_times.shape != cache.k.shape[:2]:
        raise InvalidInput(
            f"key_times is {shown(key_times)}; must be int64 (P, size) = {tuple(cache.k.shape[:2])}: the seconds of each slot"
        )
    if key_times.device != cache.k.device:
        raise InvalidInput(f"key_times is on {key_times.device}; cache.k is on {cache.k.device}")
    return key_times.contiguous()
