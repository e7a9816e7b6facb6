"""Linear attention: a feature map in place of the exponential, so that keys and values are summed once into a small state.

Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236.
"""

from __future__ import annotations

from collections.abc import Callable
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
from rooftile.approximate.linear import definition
from rooftile.errors import InvalidInput
from rooftile.exact.masks import FULL, Mask
from rooftile.recurrent.linear.by_chunks import RunningSums
from rooftile.recurrent.linear.chunked import recur
from rooftile.recurrent.linear.features import PLAIN
from rooftile.recurrent.linear.on_ranks import recur_on_ranks
from rooftile.recurrent.linear.problem import Recurrence
from rooftile.recurrent.linear.step import read_token
from rooftile.recurrent.split.context import follows_context
from rooftile.recurrent.split.part import part_of
from rooftile.runtime.arguments import check_backend, check_deterministic, check_flag
from rooftile.runtime.words import answers_foreign_words, answers_with

BACKENDS = ("triton", "tiled", "eager")
Feature = str | Callable[[Tensor], Tensor]
# the sums over keys: S (B, Hk, F, Dv) and z (B, Hk, F)
Sums = tuple[Tensor, Tensor]
_WITH_STATE = "call linear_with_state, which returns (o, (S, z))"


@follows_context("q", "k", "v")
@answers_with({"return_state": _WITH_STATE})
def linear(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    mask: Mask | None = FULL,
    *,
    backend: str | None = None,
    cu: Tensor | None = None,
    deterministic: bool | None = None,
    feature: Feature = "elu",
    group: Any = None,
    normalise: bool = True,
    state: Sums | None = None,
    validate: bool = False,
) -> Tensor:
    """Linear attention, phi(q_i)^T S_i / phi(q_i)^T z_i, with S_i = sum phi(k_j) v_j^T and z_i = sum phi(k_j) over j <= i.

    Without a mask the sums run over all j. Time and memory grow with T, not with T x S. There is no softmax scale: for the
    default features it cancels. S, z and the division are in fp32, or in fp64 for float64 inputs.

    Args:
        q: queries (B, T, H, D), float32, bfloat16, float16 or float64, any strides; with cu (total, H, D).
        k: keys (B, S, Hk, D). Hk divides H. Under CAUSAL, S is T: earlier keys come as `state`.
        v: values (B, S, Hk, Dv).
        mask: FULL or CAUSAL.
        backend: "triton" (kernels), "tiled" (plain operations, chunk by chunk) or "eager" (the definition); None or "auto" takes
            the fastest that runs.
        cu: offsets (B + 1,), int32, of packed sequences; a state then has a row for each sequence.
        deterministic: accepted as in `rooftile.attention`; results always are, as every sum has one order.
        feature: phi: "elu" is elu(x) + 1, "relu" is max(x, 0), "identity" is x; or a function of a tensor, differentiable, that
            maps the last axis and is called once for q and once for k, in their dtype.
        group: a process group or a one-dimensional DeviceMesh whose ranks hold the sequence, each a contiguous range of any
            length, under CAUSAL. Tensors of tokens are then this rank's, cu has the whole pack's offsets, and states are the
            same on every rank; the gradients of a first state are this rank's share.
        normalise: whether to divide by phi(q_i)^T z_i. A row for which that is below 2^-110 gives 0.
        state: the sums over earlier keys: S (B, Hk, F, Dv) and z (B, Hk, F), float32 (float64 for float64 inputs), F the number
            of features (D, for a name), as `linear_with_state` returns them. Gradients flow to it.
        validate: with a group: check over it that every rank was given the same problem; costs a small all-gather.

    Returns:
        o (B, T, H, Dv), contiguous, in the dtype of q.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: the named backend does not run this problem.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
        >>> linear(q, k, v, CAUSAL).shape
        torch.Size([1, 128, 8, 64])

    The class is strict and decodable: no row depends on later tokens, and `linear_step` gives the same rows one by one.
    Katharopoulos et al., arXiv:2006.16236.
    """
    return _attended(q, k, v, mask, backend, cu, deterministic, feature, normalise, state, group, validate, False)[0]


@follows_context("q", "k", "v")
@answers_with({"return_state": "leave it out: the state is always returned"})
def linear_with_state(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    mask: Mask | None = FULL,
    *,
    backend: str | None = None,
    cu: Tensor | None = None,
    deterministic: bool | None = None,
    feature: Feature = "elu",
    group: Any = None,
    normalise: bool = True,
    state: Sums | None = None,
    validate: bool = False,
) -> tuple[Tensor, Sums]:
    """Computes `linear` and also returns the sums after the last key, from which a later call goes on.

    Args:
        q, k, v, mask, backend, cu, deterministic, feature, group, normalise, state, validate: as in `linear`.

    Returns:
        o (B, T, H, Dv), and (S, z) with S (B, Hk, F, Dv) and z (B, Hk, F), float32 (float64 for float64 inputs). Gradients flow
        from both.

    Example:
        >>> q, k, v = (torch.randn(1, 128, 8, 64) for _ in range(3))
        >>> o, state = linear_with_state(q[:, :100], k[:, :100], v[:, :100], CAUSAL)
        >>> linear(q[:, 100:], k[:, 100:], v[:, 100:], CAUSAL, state=state).shape
        torch.Size([1, 28, 8, 64])
    """
    return _attended(q, k, v, mask, backend, cu, deterministic, feature, normalise, state, group, validate, True)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, backend: str | None, cu: Tensor | None, deterministic: bool | None,
    feature: Feature, normalise: bool, state: Sums | None, group: Any, validate: bool, keeps: bool,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Linear attention, and the sums after the last key; None where a group keeps none."""
    q, k, v, cu = check_qkv(q, k, v, cu, group is not None)
    part = None if group is None else part_of("linear", group, cu, q)
    causal = is_causal("linear attention", mask)
    if causal:
        check_causal_lengths("linear attention", q, k)
    normalise, chosen = check_flag("normalise", normalise), check_backend(backend, BACKENDS)
    check_deterministic(deterministic)
    check_flag("validate", validate)
    q, k, kind = _mapped(q, k, feature)
    B = q.shape[0] if cu is None else cu.shape[0] - 1
    S = z = None
    if state is not None:
        shapes = {"S": (B, k.shape[-2], k.shape[-1], v.shape[-1]), "z": (B, k.shape[-2], k.shape[-1])}
        S, z = check_states(state, shapes, q)
    if part is not None:
        sums = None if S is None or z is None else RunningSums(S, z, z.new_zeros(z.shape[:2]))
        o, last = recur_on_ranks(q, k, v, sums, Recurrence(kind, causal, normalise, backend=chosen), part, keeps, cu=cu)
        return o, last[:2] if last is not None else None
    if chosen == "eager":
        o, S, z = _as_defined(q, k, v, causal, kind, normalise, S, z, cu)
    else:
        given = None if S is None or z is None else RunningSums(S, z, z.new_zeros(z.shape[:2]))
        problem = Recurrence(kind, causal, normalise, backend=chosen)
        o, last = recur(q, k, v, given, problem, cu=cu)
        S, z = last.s, last.z
    return o, (S, z)


def _mapped(q: Tensor, k: Tensor, feature: Feature) -> tuple[Tensor, Tensor, str]:
    """The tensors on which a named map runs: those that came, or a function's."""
    if not callable(feature):
        if not isinstance(feature, str) or feature not in PLAIN:
            raise InvalidInput(f"feature is {feature!r}; must be 'elu', 'relu', 'identity' or a function of a tensor")
        return q, k, feature
    f_q, f_k = feature(q), feature(k)
    for name, x, f in (("q", q, f_q), ("k", k, f_k)):
        if not isinstance(f, Tensor) or f.ndim != x.ndim or f.shape[:-1] != x.shape[:-1]:
            came = tuple(f.shape) if isinstance(f, Tensor) else repr(f)
            raise InvalidInput(f"feature({name}) is {came}; {name} is {tuple(x.shape)}, and a feature maps the last axis alone")
    if f_q.shape[-1] != f_k.shape[-1]:
        raise InvalidInput(f"feature gives {f_q.shape[-1]} features of q and {f_k.shape[-1]} of k; they must agree")
    return f_q.to(q.dtype), f_k.to(k.dtype), "identity"


def _as_defined(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, kind: str, normalise: bool, S: Tensor | None, z: Tensor | None,
    cu: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The definition, of each packed sequence by itself."""
    given = None if S is None or z is None else (S, z)
    if cu is None:
        return definition.linear(q, k, v, causal, feature=kind, normalise=normalise, state=given)
    parts = []
    ends = cu.tolist()
    for b in range(len(ends) - 1):
        q_b, k_b, v_b = (x[None, ends[b] : ends[b + 1]] for x in (q, k, v))
        own = None if given is None else (given[0][b : b + 1], given[1][b : b + 1])
        parts.append(definition.linear(q_b, k_b, v_b, causal, feature=kind, normalise=normalise, state=own))
    if not parts:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        none = k.new_zeros((0, *k.shape[1:]), dtype=wide)
        return q.new_zeros((*q.shape[:-1], v.shape[-1])), none[..., None].expand(*none.shape, v.shape[-1]), none
    o, *last = zip(*parts, strict=True)
    return torch.cat([x[0] for x in o]), torch.cat(last[0]), torch.cat(last[1])


@answers_foreign_words
def linear_step(
    q: Tensor,  # (B, 1, H, D)
    k: Tensor,  # (B, 1, Hk, D)
    v: Tensor,  # (B, 1, Hk, Dv)
    state: tuple[Tensor, Tensor],
    *,
    feature: Feature = "elu",
    normalise: bool = True,
) -> Tensor:
    """One step of decoding with linear attention: adds the key and value to the state in place, and returns o (B, 1, H, Dv).

    Args:
        q, k, v: one token of each sequence.
        state: S (B, Hk, F, Dv) and z (B, Hk, F) in float32 (float64 for float64 inputs), as `linear_with_state` returns
            them. Updated in place.
        feature, normalise: as in `linear`.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: an input requires a gradient.

    Example:
        >>> o, state = linear_with_state(q[:, :-1], k[:, :-1], v[:, :-1], CAUSAL)
        >>> linear_step(q[:, -1:], k[:, -1:], v[:, -1:], state).shape
        torch.Size([1, 1, 8, 64])
    """
    q, k, v, _ = check_qkv(q, k, v)
    check_one_token(q, k, "linear")
    normalise = check_flag("normalise", normalise)
    q, k, kind = _mapped(q, k, feature)
    (B, _, Hk, F), Dv = k.shape, v.shape[-1]
    S, z = check_states(state, {"S": (B, Hk, F, Dv), "z": (B, Hk, F)}, q)
    check_no_gradient("linear", q, k, v, S, z)
    with torch.autocast(q.device.type, enabled=False):
        problem = Recurrence(kind, normalise=normalise)
        o = read_token(q[:, 0], k[:, 0], v[:, 0], RunningSums(S, z, z.new_zeros(z.shape[:2])), None, problem)
    return o[:, None]
