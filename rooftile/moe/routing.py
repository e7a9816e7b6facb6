"""From tokens and centroids to experts and gates, in plain operations, so that autograd has the gradients.

The choice has no gradient. A gate has one, through its score: by the softmax it reaches the logits of experts that were not
chosen, too. Where no gradient is wanted, kernels compute the same (`rooftile.moe.kernels.routing`).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.moe.products import elementwise, one_weight
from rooftile.moe.router import Router
from rooftile.runtime.arguments import check_deterministic, shown
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.operators import is_recorded
from rooftile.runtime.words import answers_foreign_words

# DeepSeek-V3 adds this to a sum of gates before it divides by the sum; a softmax's sum is too large to change by it
LEAST = 1e-20


class Routing(NamedTuple):
    """The experts that each token uses, and their gates. The leading axes are the tokens'.

    Args:
        experts: (..., K) int32.
        gates: (..., K), the factor of each expert's output, in fp32 (fp64 for tokens in fp64).
        scores: (..., E) of all routed experts, for the balance loss, in the dtype of the gates; None where no loss is wanted.
    """

    experts: Tensor
    gates: Tensor
    scores: Tensor | None = None


@answers_foreign_words
def route(
    u: Tensor,  # (..., d)
    centroids: Tensor,  # (E, d)
    router: Router | None = None,
    *,
    active: int | None = None,
    active_groups: int | None = None,
    bias: Tensor | None = None,  # (E,)
    deterministic: bool | None = None,
    group_score: str | None = None,
    groups: int | None = None,
    logit_bias: Tensor | None = None,  # (E,)
    normalise: bool | None = None,
    round_gates: bool | None = None,
    scale: float | None = None,
    score: str | None = None,
) -> Routing:
    """Chooses the experts of each token, and their gates.

    Logits, scores and gates are computed in fp32 (fp64 for tokens in fp64), also under autocast. Ties go to the lower index.
    Nothing waits for a device.

    Args:
        u: tokens (..., d), float, any strides.
        centroids: e_i (E, d), the weight of the router, in any float dtype.
        router: the options as a record.
        active, active_groups, group_score, groups, normalise, round_gates, scale, score: as in `Router`, in place of its own.
        bias: added to the scores in the choice and not in the gates (DeepSeek-V3's `e_score_correction_bias`); without gradient.
        deterministic: whether a token's choice and gates have the same bits whatever the other tokens are, and however many;
            None follows torch.
        logit_bias: added to the logits (gpt-oss).

    Returns:
        Routing(experts, gates, scores): the experts of each token by falling score. Under "chosen softmax" the scores are the
        softmax over all experts.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.

    Example:
        >>> routing = route(torch.randn(5, 16), torch.randn(8, 16), active=2)
        >>> routing.experts.shape, routing.gates.shape, routing.scores.shape
        (torch.Size([5, 2]), torch.Size([5, 2]), torch.Size([5, 8]))
    """
    words = {
        "active": active, "active_groups": active_groups, "group_score": group_score, "groups": groups, "normalise": normalise,
        "round_gates": round_gates, "scale": scale, "score": score,
    }  # fmt: skip
    router = as_router(router, words)
    _check(u, centroids, router, bias, logit_bias)
    check_deterministic(deterministic)
    # a meta tensor has no autocast
    with nullcontext() if u.is_meta else torch.autocast(u.device.type, enabled=False):
        if _takes_kernels(u, centroids, bias, logit_bias):
            return _by_kernels(u, centroids, router, bias, logit_bias, is_deterministic(deterministic))
        z, scores = _scores(u, centroids, logit_bias, router.score, is_deterministic(deterministic))
        by_logits = router.score == "chosen softmax"
        chosen = _chosen((z if by_logits else scores).detach(), bias, router)
        gates = z.gather(-1, chosen).softmax(-1) if by_logits else scores.gather(-1, chosen)
        if router.normalise:
            gates = gates / (gates.sum(-1, keepdim=True) + LEAST)
        if router.scale != 1:
            gates = gates * router.scale
        if router.round_gates:
            gates = gates.to(u.dtype).to(z.dtype)
    return Routing(chosen.to(torch.int32), gates, scores)


def as_router(router: Any, words: dict[str, Any]) -> Router:
    """Returns the record with the words that were given in place of its own."""
    given = {name: value for name, value in words.items() if value is not None}
    if router is None:
        if "active" not in given:
            raise InvalidInput("active is missing; give active=, the number of experts that a token uses, or a Router")
        return Router(**given)
    if not isinstance(router, Router):
        raise InvalidInput(f"router is {shown(router)}; must be a rooftile.moe.Router")
    return replace(router, **given) if given else router


def is_deterministic(deterministic: bool | None) -> bool:
    """Whether bits may not depend on neighbours: as asked, or as torch is set."""
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def _check(u: Any, centroids: Any, router: Router, bias: Any, logit_bias: Any) -> None:
    if not isinstance(u, Tensor) or not u.is_floating_point() or not u.ndim:
        raise InvalidInput(f"u is {shown(u)}; must be a floating-point tensor (..., d)")
    if not isinstance(centroids, Tensor) or not centroids.is_floating_point() or centroids.ndim != 2:
        raise InvalidInput(f"centroids is {shown(centroids)}; must be a floating-point tensor (E, d)")
    if centroids.shape[1] != u.shape[-1]:
        raise InvalidInput(f"centroids is {tuple(centroids.shape)} and u {tuple(u.shape)}; must be (E, d) and (..., d)")
    E = centroids.shape[0]
    for name, x in (("bias", bias), ("logit_bias", logit_bias)):
        if x is not None and (not isinstance(x, Tensor) or not x.is_floating_point() or tuple(x.shape) != (E,)):
            raise InvalidInput(f"{name} is {shown(x)}; must be a floating-point tensor ({E},), a number for each expert")
    for name, x in (("centroids", centroids), ("bias", bias), ("logit_bias", logit_bias)):
        if x is not None and x.device != u.device:
            raise InvalidInput(f"{name} is on {x.device}; u is on {u.device}, and all inputs must be on one device")
    router.check_experts(E)


def _takes_kernels(*tensors: Tensor | None) -> bool:
    """Whether kernels may route: nothing records, compiles or replaces operations, and tensors are on a GPU, in their sizes."""
    u, centroids = tensors[:2]
    assert u is not None
    assert centroids is not None
    if is_recorded(*tensors) or u.is_meta or not runs_kernels(u):
        return False
    # imported where Triton is known to be there
    from rooftile.moe.kernels import routing

    return routing.refusal(u, centroids) is None


def _by_kernels(
    u: Tensor, centroids: Tensor, router: Router, bias: Tensor | None, logit_bias: Tensor | None, deterministic: bool
) -> Routing:  # fmt: skip
    from rooftile.moe.kernels import routing

    rows = u.reshape(-1, u.shape[-1])
    found = routing.route(rows, centroids, bias, logit_bias, router, LEAST, deterministic)
    return Routing(*(x.view(*u.shape[:-1], x.shape[-1]) for x in found))


def _scores(
    u: Tensor, centroids: Tensor, bias: Tensor | None, score: str, deterministic: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits and scores (..., E)."""
    wide = torch.promote_types(u.dtype, torch.float32)
    rows = u.to(wide).reshape(-1, u.shape[-1])
    z = one_weight(rows, centroids.to(wide), deterministic, None if bias is None else bias.to(wide))
    scores = elementwise(torch.sigmoid, z, deterministic) if score == "sigmoid" else z.softmax(-1)
    shape = (*u.shape[:-1], centroids.shape[0])
    return z.view(shape), scores.view(shape)


def _chosen(scores: Tensor, bias: Tensor | None, router: Router) -> Tensor:
    """The best experts (..., K) by falling score, int64. A stable sort leaves ties in their order; `topk` does not say."""
    if bias is not None:
        scores = scores + bias.detach().to(scores.dtype)
    if router.groups > 1:
        scores = _in_best_groups(scores, router)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., : router.active]


def _in_best_groups(scores: Tensor, router: Router) -> Tensor:
    """The scores, -inf outside of each token's best groups: with a bias a score may be below 0."""
    by_group = scores.unflatten(-1, (router.groups, -1))
    best = by_group.amax(-1) if router.group_score == "maximum" else by_group.topk(2, -1).values.sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[..., : router.active_groups]
    left_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
    return by_group.masked_fill(left_out[..., None], -math.inf).flatten(-2)
