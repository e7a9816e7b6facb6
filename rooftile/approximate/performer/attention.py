"""Performer: softmax attention estimated by random features, in time and memory that grow with T.

Choromanski et al., Rethinking Attention with Performers, arXiv:2009.14794.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.arguments import (
    check_causal_lengths,
    check_no_gradient,
    check_one_token,
    check_qkv,
    check_states,
    is_causal,
)
from rooftile.approximate.linear.attention import BACKENDS
from rooftile.approximate.performer import definition
from rooftile.approximate.performer.features import Features, check_positive_scale
from rooftile.errors import InvalidInput
from rooftile.exact.masks import FULL, Mask
from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.chunked import recur
from rooftile.recurrent.linear.on_ranks import recur_on_ranks
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.recurrent.linear.step import read_token
from rooftile.recurrent.split.context import follows_context
from rooftile.recurrent.split.part import part_of
from rooftile.runtime.arguments import check_backend, check_deterministic, check_flag, shown
from rooftile.runtime.words import answers_foreign_words, answers_with

# the recurrence's names of the maps; a hyperbolic one is the positive one of W and -W
_MAPS = {"positive": "exp", "hyperbolic": "exp", "trigonometric": "wave", "relu": "random relu"}
# the sums over keys, and the largest exponent so far
Sums = tuple[Tensor, Tensor, Tensor]
_WITH_STATE = "call performer_with_state, which returns (o, (S, z, largest))"


@follows_context("q", "k", "v")
@answers_with({"return_state": _WITH_STATE})
def performer(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    mask: Mask | None = FULL,
    *,
    features: Features,
    backend: str | None = None,
    cu: Tensor | None = None,
    deterministic: bool | None = None,
    group: Any = None,
    scale: float | None = None,
    state: Sums | None = None,
    validate: bool = False,
) -> Tensor:
    """Performer's attention: sum_j A_ij v_j / sum_j A_ij, with A_ij = phi(q_i) . phi(k_j) for random features phi.

    On average A_ij is exp(scale q_i . k_j), so o estimates `rooftile.attention`. The exponents are taken relative to the largest
    key so far, which is carried with the state: under CAUSAL no row depends on later tokens. There is no epsilon. A row whose
    weights sum to less than 2^-110 of the largest gives 0: its query has no feature in common with any key.

    Args:
        q: queries (B, T, H, D), float32, bfloat16, float16 or float64, any strides; with cu (total, H, D).
        k: keys (B, S, Hk, D). Hk divides H. Under CAUSAL, S is T: earlier keys come as `state`.
        v: values (B, S, Hk, Dv).
        mask: FULL or CAUSAL.
        features: made by `Features.draw(D, m)`; the projection has no gradient.
        backend: "triton" (kernels), "tiled" (plain operations, chunk by chunk) or "eager" (the definition, which holds
            T x S x m numbers); None or "auto" takes the fastest that runs.
        cu: offsets (B + 1,), int32, of packed sequences; a state then has a row for each sequence.
        deterministic: accepted as in `rooftile.attention`; results always are, as every sum has one order.
        group: a process group or a one-dimensional DeviceMesh whose ranks hold the sequence, each a contiguous range of any
            length, under CAUSAL. Tensors of tokens are then this rank's, cu has the whole pack's offsets, and states are the
            same on every rank; the gradients of a first state are this rank's share.
        scale: of the scores, above 0; 1 / sqrt(D) if None.
        state: the sums over earlier keys: S (B, Hk, m, Dv), z (B, Hk, m) and the largest exponent so far (B, Hk), float32
            (float64 for float64 inputs), as `performer_with_state` returns them. Gradients flow to S and z.
        validate: with a group: check over it that every rank was given the same problem; costs a small all-gather.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend does not run this problem.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
        >>> performer(q, k, v, CAUSAL, features=Features.draw(64, 256, seed=0)).shape
        torch.Size([1, 128, 8, 64])

    The class is strict and decodable, and `performer_step` gives the same rows one by one. Choromanski et al., arXiv:2009.14794.
    """
    return _attended(q, k, v, mask, features, backend, cu, deterministic, scale, state, group, validate, False)[0]


@follows_context("q", "k", "v")
@answers_with({"return_state": "leave it out: the state is always returned"})
def performer_with_state(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    mask: Mask | None = FULL,
    *,
    features: Features,
    backend: str | None = None,
    cu: Tensor | None = None,
    deterministic: bool | None = None,
    group: Any = None,
    scale: float | None = None,
    state: Sums | None = None,
    validate: bool = False,
) -> tuple[Tensor, Sums]:
    """Computes `performer` and also returns the sums after the last key, from which a later call goes on.

    Args:
        q, k, v, mask, features, backend, cu, deterministic, group, scale, state, validate: as in `performer`.

    Returns:
        o (B, T, H, Dv), and (S, z, largest) with S (B, Hk, m, Dv), z (B, Hk, m) and the largest exponent so far (B, Hk), float32
        (float64 for float64 inputs). Gradients flow from o, S and z.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
        >>> features = Features.draw(64, 256, seed=0)
        >>> o, state = performer_with_state(q[:, :100], k[:, :100], v[:, :100], CAUSAL, features=features)
        >>> performer(q[:, 100:], k[:, 100:], v[:, 100:], CAUSAL, features=features, state=state).shape
        torch.Size([1, 28, 8, 64])
    """
    return _attended(q, k, v, mask, features, backend, cu, deterministic, scale, state, group, validate, True)


@answers_foreign_words
def performer_step(
    q: Tensor,  # (B, 1, H, D)
    k: Tensor,  # (B, 1, Hk, D)
    v: Tensor,  # (B, 1, Hk, Dv)
    state: Sums,
    *,
    features: Features,
    scale: float | None = None,
) -> Tensor:
    """One step of decoding with Performer's attention: adds the key and value to the state in place, and returns o (B, 1, H, Dv).

    It never waits for the device, so a CUDA graph can hold it.

    Args:
        q, k, v: one token of each sequence.
        state: S (B, Hk, m, Dv), z (B, Hk, m) and the largest exponent so far (B, Hk) in float32 (float64 for float64 inputs), as
            `performer_with_state` returns them. Updated in place.
        features, scale: as in `performer`.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: an input requires a gradient.

    Example:
        >>> features = Features.draw(64, 256, seed=0)
        >>> o, state = performer_with_state(q[:, :-1], k[:, :-1], v[:, :-1], CAUSAL, features=features)
        >>> performer_step(q[:, -1:], k[:, -1:], v[:, -1:], state, features=features).shape
        torch.Size([1, 1, 8, 64])
    """
    q, k, v, _ = check_qkv(q, k, v)
    check_one_token(q, k, "performer")
    W, number = _projection_for(features, q), check_positive_scale(scale, q.shape[-1])
    sums = RunningSums(*check_states(state, _shapes(q.shape[0], k, v, features), q))
    check_no_gradient("performer", q, k, v, sums.s, sums.z)
    with torch.autocast(q.device.type, enabled=False):
        W, problem = _problem(features.kind, W.to(sums.s.dtype), True, number, "auto")
        return read_token(q[:, 0], k[:, 0], v[:, 0], sums, W, problem)[:, None]


def _attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, features: Features, backend: str | None, cu: Tensor | None,
    deterministic: bool | None, scale: float | None, state: Sums | None, group: Any, validate: bool, keeps: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Performer's attention, and the sums after the last key; None where a group keeps none."""
    q, k, v, cu = check_qkv(q, k, v, cu, group is not None)
    part = None if group is None else part_of("performer", group, cu, q)
    causal = is_causal("Performer", mask)
    if causal:
        check_causal_lengths("Performer", q, k)
    chosen = check_backend(backend, BACKENDS)
    check_deterministic(deterministic)
    check_flag("validate", validate)
    projection = _projection_for(features, q)
    number = check_positive_scale(scale, q.shape[-1])
    B = q.shape[0] if cu is None else cu.shape[0] - 1
    given = None
    if state is not None:
        given = RunningSums(*check_states(state, _shapes(B, k, v, features), q))
    if part is not None:
        projection, problem = _problem(features.kind, projection, causal, number, chosen)
        o, sums = recur_on_ranks(q, k, v, given, problem, part, keeps, cu=cu, projection=projection)
        return o, sums
    if chosen == "eager":
        o, last = _as_defined(q, k, v, causal, features.kind, projection, number, given, cu)
    else:
        projection, problem = _problem(features.kind, projection, causal, number, chosen)
        o, last = recur(q, k, v, given, problem, cu=cu, projection=projection)
    S, z, largest = last
    return o, (S, z, largest)


def _shapes(B: int, k: Tensor, v: Tensor, features: Features) -> dict[str, tuple[int, ...]]:
    """The shapes of a state's tensors."""
    Hk, m = k.shape[-2], features.m
    return {"S": (B, Hk, m, v.shape[-1]), "z": (B, Hk, m), "largest": (B, Hk)}


def _problem(kind: str, projection: Tensor, causal: bool, scale: float, backend: str) -> tuple[Tensor, Recurrence]:
    """The projection and the options of the recurrence of a kind of features."""
    if kind == "hyperbolic":
        projection = torch.cat((projection, -projection))
    return projection, Recurrence(_MAPS[kind], causal, True, scale, backend)


def _projection_for(features: Any, q: Tensor) -> Tensor:
    if not isinstance(features, Features):
        raise InvalidInput(f"features is {shown(features)}; must be made by rooftile.approximate.Features.draw(D, m)")
    if features.dim != q.shape[-1]:
        raise InvalidInput(f"features were drawn for head dim {features.dim}; q has {q.shape[-1]}, and they must agree")
    if features.projection.device != q.device:
        raise InvalidInput(f"features are on {features.projection.device}; q is on {q.device}: write Features.draw(..., device=)")
    return features.projection


def _as_defined(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: str, projection: Tensor, scale: float, state: RunningSums | None,
    cu: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """The definition, of each packed sequence by itself."""
    if cu is None:
        return definition.performer(q, k, v, causal, projection, kind, scale=scale, state=state)
    parts = []
    ends = cu.tolist()
    for b in range(len(ends) - 1):
        q_b, k_b, v_b = (x[None, ends[b] : ends[b + 1]] for x in (q, k, v))
        own = None if state is None else RunningSums(*(x[b : b + 1] for x in state))
        parts.append(definition.performer(q_b, k_b, v_b, causal, projection, kind, scale=scale, state=own))
    if not parts:
        # an empty batch
        no_q, no_k, no_v = (x.new_zeros((1, 0, *x.shape[1:])) for x in (q, k, v))
        _, last = definition.performer(no_q, no_k, no_v, causal, projection, kind, scale=scale)
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), tuple(x[:0] for x in last)
    columns = zip(*(last for _, last in parts), strict=True)
    return torch.cat([o[0] for o, _ in parts]), tuple(torch.cat(column) for column in columns)
