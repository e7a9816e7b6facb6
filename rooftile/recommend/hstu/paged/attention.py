"""`hstu_attention_paged`: HSTU attention of appended events and of candidates to histories in pages, and its operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import Unsupported
from rooftile.exact.masks import CAUSAL, Mask
from rooftile.kvcache import PagedKV
from rooftile.recommend.foreign_words import HSTU
from rooftile.recommend.hstu.bias import RelativeBias
from rooftile.recommend.hstu.paged import definition, tiled
from rooftile.recommend.hstu.paged.arguments import check_call
from rooftile.recommend.hstu.paged.problem import Pages
from rooftile.recommend.hstu.problem import Problem, decode_mask, encode_mask
from rooftile.runtime.arguments import check_backend
from rooftile.runtime.devices import arch, lack_of_kernels, lacks_fp8, warn_without_triton
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import call, define, wants_grad
from rooftile.runtime.words import answers_with

BACKENDS = ("triton", "tiled", "eager")


@answers_with(HSTU)
def hstu_attention_paged(
    q: Tensor,  # (total, H, D)
    cache: PagedKV,
    *,
    alpha: float,
    scale: float,
    mask: Mask | None = CAUSAL,
    bias: RelativeBias | None = None,
    times: Tensor | None = None,
    key_times: Tensor | None = None,
    candidates: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """HSTU attention of a few rows per user to the user's history in pages: y_i = scale sum_j silu(alpha q_i k_j + bias_ij) v_j.

    Without `candidates` the rows are each user's last events, whose keys and values are in the pages already. With them the rows
    are targets behind the history: each sees the history by the mask, and itself, and nothing is written.

    Args:
        q: queries (total, H, D) of users one after the other, float32, bfloat16, float16 or float64.
        cache: a layer's keys (P, size, H, D) and values (P, size, H, Dv) in any float dtype, or in FP8 or INT8 with scales;
            block tables (B, N); lengths (B,), events of each user in the pages; and offsets cu_q (B + 1,) of the rows of q.
        alpha: the factor of the scores.
        scale: the factor of the sum.
        mask: among events, as in `hstu_attention` but without `Targets`; candidates have the position behind the history.
        bias: as in `hstu_attention`.
        times: (total,) int, seconds of the rows, rising within a user, for a bias with times.
        key_times: (P, size) int64, seconds of the events in the pages.
        candidates: their own keys (total, H, D) and values (total, H, Dv).
        backend: "triton", "tiled" or "eager", as in `hstu_attention`.

    Returns:
        y (total, H, Dv), contiguous, in the dtype of q. On a GPU a long history is split over programs, whose sums are added in
        a fixed order: the bits are the same in every run.

    Raises:
        InvalidInput: an argument is wrong.
        Unsupported: a gradient is asked for, or the named backend does not run this problem.

    Example:
        >>> from rooftile.kvcache import PagedKV, Pages
        >>> pages = Pages(8, layers=1, heads=2, dim=16, dtype=torch.float32)
        >>> table, lengths = torch.tensor([[3, 1], [5, 0]], dtype=torch.int32), torch.tensor([20, 9], dtype=torch.int32)
        >>> cu = torch.tensor([0, 4, 6], dtype=torch.int32)           # four candidates for a user, and two for the other
        >>> q, k, v = torch.randn(3, 6, 2, 16)
        >>> hstu_attention_paged(q, pages.view(0, table, lengths, cu), alpha=0.25, scale=0.05, candidates=(k, v)).shape
        torch.Size([6, 2, 16])
    """
    q, given, problem = check_call(q, cache, alpha, scale, mask, bias, times, key_times, candidates)
    way = check_backend(backend, BACKENDS)
    if wants_grad(q, given.position_table, given.time_table, given.own_k, given.own_v):
        raise Unsupported("hstu_attention_paged has no gradient: call it under torch.no_grad(), and train with hstu_attention")
    reason = _refusal(q, given, problem)
    if way == "triton" and reason is not None:
        raise Unsupported(f"backend 'triton' cannot run HSTU attention over pages: {reason}")
    if way == "eager":
        return definition.hstu_attention_paged(q, given, problem)
    if way == "auto":
        warn_without_triton(q.is_cuda)
        way = "tiled" if reason is not None else "triton"
    pages = given.cache
    found: Tensor = call(
        _ATTENTION, _run, q, pages.k, pages.v, pages.table, pages.lengths, given.cu, pages.k_scale, pages.v_scale, *given[1:],
        problem.alpha, problem.scale, problem.zero, encode_mask(problem.mask), way,
    )  # fmt: skip
    return found


def _refusal(q: Tensor, given: Pages, problem: Problem) -> str | None:
    """Says why no kernel runs such tensors; None if one does."""
    if lack := lack_of_kernels(arch(q.device)):
        return lack
    if torch.float64 in (q.dtype, given.cache.k.dtype):
        return "numbers are float64; has float32, bfloat16 and float16"
    if max(q.shape[2], given.cache.v.shape[3]) > 256:
        return f"head dim is {q.shape[2]} for q and {given.cache.v.shape[3]} for v; has up to 256"
    if len(problem.mask.chunks) > 1:
        return f"mask {problem.mask}; has one chunk size"
    if given.cache.k.dtype == torch.float8_e4m3fn and lacks_fp8(q.device):
        return f"a cache in FP8 on {arch(q.device)}; needs sm89 (Ada) or newer, or INT8"
    return None


def _run(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, cu: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    *rest: Any,
) -> Tensor:  # fmt: skip
    *tensors, alpha, scale, zero, mask, backend = rest
    given = Pages(PagedKV(k, v, table, lengths, cu, k_scale, v_scale), *tensors)
    problem = Problem(alpha, scale, decode_mask(mask), 0, zero)
    with torch.no_grad(), device_of(q), torch.autocast(q.device.type, enabled=False):
        if backend == "tiled":
            return tiled.forward(q, given, problem)
        from rooftile.recommend.hstu.kernels import paged

        return paged.forward(q, given, problem)


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:2], v.shape[3]))


_ATTENTION = define(
    "hstu_attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor table, Tensor lengths, Tensor cu, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? own_k, Tensor? own_v, Tensor? position_table, Tensor? time_table, Tensor? edges, "
    "Tensor? row_times, Tensor? key_times, float alpha, float scale, int zero, int[] mask, str backend) -> Tensor",
    _run,
    _fake,
)
