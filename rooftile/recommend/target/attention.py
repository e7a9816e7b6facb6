"""`target_attention`: candidates of each user against the user's history, whole or the events that a search finds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import api, split
from rooftile.recommend.foreign_words import TARGET
from rooftile.recommend.target import definition, operator
from rooftile.recommend.target.arguments import check_call
from rooftile.recommend.target.problem import Batch, Problem
from rooftile.recommend.target.search import operator as searches
from rooftile.recommend.target.search.arguments import check_no_search, check_search
from rooftile.runtime.arguments import check_backend
from rooftile.runtime.devices import warn_without_triton
from rooftile.runtime.operators import transforms_active, wants_grad, watched
from rooftile.runtime.words import answers_with

BACKENDS = ("triton", "tiled", "eager")


@answers_with(TARGET)
def target_attention(
    q: Tensor,  # (B, M, H, D), or (total_q, H, D) with cu_q
    keys: Tensor,  # (total, Hk, D)
    cu: Tensor,  # (B + 1,)
    *,
    backend: str | None = None,
    bias: Tensor | None = None,
    cu_q: Tensor | None = None,
    deterministic: bool | None = None,
    key_categories: Tensor | None = None,
    mean: bool = False,
    per_head: bool | None = None,
    planes: Tensor | None = None,
    q_categories: Tensor | None = None,
    scale: float | None = None,
    search: str | None = None,
    search_keys: Tensor | None = None,
    search_q: Tensor | None = None,
    short: str | None = None,
    top_k: int | None = None,
    values: Tensor | None = None,
    weights: str = "softmax",
) -> Tensor:
    """Attention of candidates to the history of their user: o = sum_j w(scale q k_j + bias_j) v_j over all events, or over k.

    The candidates of a user share its history, which is read once for all of them, and do not see each other.

    Args:
        q: M candidates of each of B users (B, M, H, D), float32, bfloat16, float16 or float64, any strides; or candidates laid
            back to back (total_q, H, D) with `cu_q`.
        keys: events of all users (total, Hk, D), oldest first. Hk divides H; each key head serves H / Hk heads of q.
        cu: offsets (B + 1,) of users among events, int32 or int64, from 0 to total. A user may have no event: its rows are 0.
        backend: "triton" (kernels), "tiled" (plain operations, a piece at a time) or "eager" (the definition); None or "auto"
            takes the fastest that runs: `rooftile.attention_packed` for softmax over whole histories without a bias, on a GPU
            over parts of long histories at once where users are few and no gradient is asked for.
        bias: (total,) or (total, 1|H), added to the scores of an event: TWIN's cross features. -inf hides an event. With
            gradient.
        cu_q: offsets (B + 1,) of users among packed candidates.
        deterministic: a candidate's bits depend on the candidate and its user alone: one at a time or many at once. None follows
            torch.use_deterministic_algorithms.
        key_categories: (total,) int, for search="category".
        mean: divides the sum by the number of the events that are read.
        per_head: whether each head chooses events of its own, which is the default, or all by the sum of the heads' scores; not
            for categories, which are the same for all heads.
        planes: (D, bits) of `simhash_planes`, for search="lsh"; not for hashes.
        q_categories: (B, M), or (total_q,) with cu_q.
        scale: of the scores; 1 / sqrt(D) if None.
        search: how the k events are found. "exact", by default: those with the largest scores, bias included (SIM's soft search,
            and TWIN). "lsh": those whose hash differs from the candidate's in the fewest bits (ETA). "category": the latest of
            the candidate's category, at most k (SIM's hard search). Of equal events the latest are taken.
        search_keys: (total, heads, dim): features of events for the search in place of keys; the bias is not added to their
            scores. For "lsh" also hashes of `simhash`, int32 words.
        search_q: (B, M, 1|H, dim), or (total_q, 1|H, dim): features of candidates for the search.
        short: under "refuse", the default, a user with fewer than top_k events is an error; "all" reads all its events. Offsets
            on a GPU are not read, and all are. Not for categories, of which a user may have any number of events.
        top_k: how many events a candidate reads; None for the whole history. Gradients flow to the events that are chosen, and
            none through the choice.
        values: (total, Hk, Dv); keys if None.
        weights: "softmax"; "sigmoid" or "silu" of each score by itself, which keep the strength of an interest: DIN divides
            by nothing, nor does this.

    Returns:
        o (B, M, H, Dv) or (total_q, H, Dv), contiguous, in the dtype of q.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend does not run this problem.

    Example:
        >>> history, candidates = torch.randn(300, 2, 32), torch.randn(3, 8, 2, 32)
        >>> cu = torch.tensor([0, 100, 100, 300])
        >>> target_attention(candidates, history, cu, weights="silu").shape
        torch.Size([3, 8, 2, 32])
        >>> target_attention(candidates, history, cu, top_k=20, short="all").shape
        torch.Size([3, 8, 2, 32])

    Zhou et al., Deep Interest Network, arXiv:1706.06978. Pi et al., Search-based Interest Model, arXiv:2006.05639. Chen et al.,
    End-to-End Target Attention, arXiv:2108.04468. Chang et al., TWIN, arXiv:2302.02352.
    """
    return _attend(
        q, keys, cu, backend, (values, bias, cu_q, weights, scale, mean, deterministic), top_k,
        search=search, short=short, per_head=per_head, search_q=search_q, search_keys=search_keys, planes=planes,
        q_categories=q_categories, key_categories=key_categories,
    )[0]  # fmt: skip


@answers_with(TARGET)
def target_attention_with_events(
    q: Tensor,  # (B, M, H, D), or (total_q, H, D) with cu_q
    keys: Tensor,  # (total, Hk, D)
    cu: Tensor,  # (B + 1,)
    *,
    top_k: int,
    backend: str | None = None,
    bias: Tensor | None = None,
    cu_q: Tensor | None = None,
    deterministic: bool | None = None,
    key_categories: Tensor | None = None,
    mean: bool = False,
    per_head: bool | None = None,
    planes: Tensor | None = None,
    q_categories: Tensor | None = None,
    scale: float | None = None,
    search: str | None = None,
    search_keys: Tensor | None = None,
    search_q: Tensor | None = None,
    short: str | None = None,
    values: Tensor | None = None,
    weights: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """`target_attention` over k events, and which those are.

    Takes what `target_attention` takes. Returns o, and events (B, M, 1|H, k) or (total_q, 1|H, k), int64: places in the user's
    history, the best first, -1 where fewer were found. There is one head where all heads read the same events.

    Example:
        >>> history, candidates = torch.randn(300, 2, 32), torch.randn(2, 8, 2, 32)
        >>> o, events = target_attention_with_events(candidates, history, torch.tensor([0, 100, 300]), top_k=20)
        >>> events.shape
        torch.Size([2, 8, 2, 20])
    """
    if top_k is None:
        raise InvalidInput("top_k is None; give a number of events, or call target_attention, which reads all of them")
    o, events = _attend(
        q, keys, cu, backend, (values, bias, cu_q, weights, scale, mean, deterministic), top_k,
        search=search, short=short, per_head=per_head, search_q=search_q, search_keys=search_keys, planes=planes,
        q_categories=q_categories, key_categories=key_categories,
    )  # fmt: skip
    assert events is not None
    return o, events.long()


def _attend(
    q: Any, keys: Any, cu: Any, backend: Any, rest: tuple[Any, ...], top_k: Any, **search: Any
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The outputs, and the events that were chosen if there is a search."""
    batch, problem = check_call(q, keys, cu, *rest)
    way = check_backend(backend, BACKENDS)
    reason = operator.refusal(batch)
    if way == "triton" and reason is not None:
        raise Unsupported(f"backend 'triton' cannot run target attention: {reason}")
    users = q.shape[:2] if q.ndim == 4 else None
    if top_k is None:
        check_no_search(**search)
    else:
        found = check_search(batch, problem, None if users is None else users[1], (cu, rest[2]), top_k, **search)
        if way == "triton" and (lack := searches.refusal(found)) is not None:
            raise Unsupported(f"backend 'triton' cannot run the search of target attention: {lack}")
        plain = way == "eager" or transforms_active()
        events = definition.search(found) if plain else searches.search(found, way)
        batch = batch._replace(events=events)
    o = _outputs(batch, problem, way, "tiled" if reason is not None else "triton")
    if users is None:
        return o, batch.events
    return o.unflatten(0, users), None if batch.events is None else batch.events.unflatten(0, users)


def _outputs(batch: Batch, problem: Problem, way: str, fastest: str) -> Tensor:
    """Runs a problem whose events are known."""
    if way == "eager" or transforms_active():
        with torch.autocast(batch.q.device.type, enabled=False):
            return definition.target_attention(batch, problem)
    if way == "auto":
        plain_softmax = problem == Problem("softmax", problem.scale, False, False) and batch.bias is None
        if plain_softmax and batch.events is None and batch.q.dtype != torch.float64:
            if fastest == "triton" and (parts := _parts_of(batch, problem)) > 1:
                return _in_parts(batch, problem.scale, parts)
            q, keys, values = batch[:3]
            return api.attention_packed(q, keys, values, batch.cu_q, batch.cu, scale=problem.scale, deterministic=False)
        warn_without_triton(batch.q.is_cuda)
        way = fastest
    return operator.attend(batch, problem, way)


def _parts_of(batch: Batch, problem: Problem) -> int:
    """The parts into which kernels cut the histories of a softmax; 1 where packed attention takes the call as it is.

    Packed attention has the gradients and the operator of a compiled graph, and the ranks of `rooftile.parallel.context`.
    """
    given = (*batch[:3], batch.cu_q, batch.cu)
    if torch.compiler.is_compiling() or watched(*given) or batch.q.is_meta or wants_grad(*batch[:3]) or split.active():
        return 1
    from rooftile.recommend.target.kernels import parts

    return parts.parts_of(batch)


def _in_parts(batch: Batch, scale: float, parts: int) -> Tensor:
    from rooftile.recommend.target.kernels.parts import attend

    return attend(batch, scale, parts)
