"""A ring of eight ranks in bf16, computed one rank after the other in this process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import NO_OPTIONS, CallSettings
from rooftile.parallel import ring
from rooftile.parallel.layouts import ranges
from rooftile.runtime.ranks import Ranks

P, T = 8, 1000


def test_eight_ranks_have_one_device_s_error_and_parts_in_bf16_have_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial results stay in fp32 from hop to hop; a ring whose parts are rounded to bf16 is measured beside it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, 64).bfloat16() for heads in (4, 2, 2))
    held = ranges(T, P, "zigzag")
    settings = CallSettings(needs_lse=True, partial=True, wide_grads=True, backend="tiled")

    def rows_of(x: Tensor, rank: int) -> Tensor:
        return torch.cat([x[:, start:stop] for start, stop in held[rank]], 1)

    def around(problem: Any, own_keys: Tensor, own_values: Tensor) -> Any:
        # a rank has its own keys first, and then its neighbours', as they come
        for hop in range(P):
            owner = (problem.ranks.rank - hop) % P
            yield owner, (rows_of(k, owner), rows_of(v, owner))

    monkeypatch.setattr(ring, "_around", around)
    in_ring, rounded = [], []
    for rank in range(P):
        problem = ring.Problem(Ranks(None, rank, P), held, None, CAUSAL, settings)
        own = [rows_of(x, rank) for x in (q, k, v)]
        in_ring.append(ring.attend(*own, NO_OPTIONS, problem)[0])
        rounded.append(_merged_in_bf16(own[0], list(around(problem, *own[1:])), problem))
    exact = rt.attention(*(x.double() for x in (q, k, v)), CAUSAL, backend="eager")
    due = torch.cat([rows_of(exact, rank) for rank in range(P)], 1)
    alone = rt.attention(q, k, v, CAUSAL, backend="tiled")

    def error(parts: list[Tensor]) -> float:
        return float((torch.cat(parts, 1).double() - due).square().mean().sqrt())

    own_error = error([rows_of(alone, rank) for rank in range(P)])
    assert error(in_ring) <= 1.1 * own_error
    assert error(rounded) > 1.3 * own_error


def _merged_in_bf16(q: Tensor, keys: list[tuple[int, Any]], problem: ring.Problem) -> Tensor:
    """Merges parts as they come, with o in bf16 after every hop."""
    o, lse = torch.zeros_like(q), torch.full((1, q.shape[2], q.shape[1]), -torch.inf)
    for owner, (own_keys, own_values) in keys:
        for part in problem.parts(owner):
            rows, tokens = slice(*part.rows), slice(*part.keys)
            found = rt.attention_with_lse(q[:, rows], own_keys[:, tokens], own_values[:, tokens], part.mask)
            o[:, rows], lse[..., rows] = rt.merge([(o[:, rows], lse[..., rows]), found])
    return o
