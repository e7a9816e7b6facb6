"""The balance loss, which spreads tokens over experts, and the step of a selection bias, which does so without a loss.

For a sequence of T tokens, K of E experts each:

    f_i = E / (K T) (tokens that chose i)    a constant
    P_i = mean over tokens of s_i
    loss = alpha sum_i f_i P_i

and the mean over sequences. Over groups of experts f is averaged in each group and P summed. As f is a constant, the loss is a
sum over tokens of f_i s_i / T, so nothing is added up by sequence but whole numbers, and every sum has a fixed order.

DeepSeekMoE, arXiv:2401.06066, equations 12 to 17; DeepSeek-V3, arXiv:2412.19437, 2.1.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.moe.routing import LEAST, Routing
from rooftile.runtime.arguments import check_count, check_number, shown
from rooftile.runtime.tensors import check_offsets
from rooftile.runtime.words import answers_foreign_words


@answers_foreign_words
def balance_loss(
    routing: Routing,
    *,
    alpha: float = 0.001,
    cu: Tensor | None = None,  # (B + 1,)
    groups: int | None = None,
) -> Tensor:
    """alpha times the sum over experts of their load and their mean score, for each sequence, then the mean over sequences.

    It is alpha where all experts are chosen alike. The scores of a token are divided by their sum first, as DeepSeek-V3 does for
    sigmoid scores; the scores of a softmax sum to 1. Counts of tokens are constants: the gradient flows through the scores.

    Args:
        routing: of `route`: (tokens, K), a sequence for itself or packed ones, or (B, T, K), a sequence for each of B.
        alpha: the weight of the loss.
        cu: offsets (B + 1,), int32, of packed sequences; sequences without tokens do not count.
        groups: of experts on one device each, neighbours of equal number: their mean load and the sum of their scores count.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.

    Example:
        >>> routing = route(torch.randn(3, 100, 16), torch.zeros(8, 16), active=8)
        >>> balance_loss(routing, alpha=0.01)
        tensor(0.0100)
    """
    experts, scores, alpha, groups = _check(routing, alpha, groups)
    K, E = experts.shape[-1], scores.shape[-1]
    if cu is None:
        sequence, B = _places_of_batch(experts)
    else:
        sequence, B = _places_of_packed(experts, cu)
    experts, scores = experts.reshape(-1, K), scores.reshape(-1, E)
    ones = torch.ones_like(experts, dtype=scores.dtype).flatten()
    tokens = torch.zeros(B, dtype=scores.dtype, device=scores.device).scatter_add(0, sequence, ones[: len(sequence)])
    places = (sequence[:, None] * E + experts).flatten()
    counts = torch.zeros(B * E, dtype=scores.dtype, device=scores.device).scatter_add(0, places, ones).view(B, E)
    if groups is not None:
        counts = counts.unflatten(1, (groups, -1)).mean(-1, keepdim=True).expand(-1, -1, E // groups).flatten(1)
    # E / (K T) for the load, and 1 / T for the mean of the scores
    load = counts * (E / K) / tokens.clamp(min=1).square()[:, None]
    scores = scores / (scores.sum(-1, keepdim=True) + LEAST)
    return (load[sequence] * scores).sum() * alpha / (tokens > 0).sum().clamp(min=1)


@answers_foreign_words
def update_bias(bias: Tensor, routing: Routing, rate: float = 0.001) -> Tensor:
    """Moves a selection bias in place: up by `rate` for experts with fewer tokens than the mean, down for those with more.

    Args:
        bias: (E,) float32 or float64, as `route` takes it.
        routing: of all tokens of a step.
        rate: the step, DeepSeek-V3's gamma.

    Returns:
        The bias.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.

    Example:
        >>> bias = torch.zeros(8)
        >>> routing = route(torch.randn(100, 16), torch.randn(8, 16), active=2, score="sigmoid", bias=bias)
        >>> bool(update_bias(bias, routing, rate=0.01).any())
        True
    """
    _check_routing(routing)
    if not isinstance(bias, Tensor) or bias.dtype not in (torch.float32, torch.float64) or bias.ndim != 1:
        raise InvalidInput(f"bias is {shown(bias)}; must be a float32 tensor (E,): a step would be lost in fewer bits")
    if routing.scores is not None and routing.scores.shape[-1] != len(bias):
        raise InvalidInput(f"bias is {tuple(bias.shape)}; routing has {routing.scores.shape[-1]} experts")
    if bias.device != routing.experts.device:
        raise InvalidInput(f"bias is on {bias.device} and routing on {routing.experts.device}; must be on one device")
    rate = check_number("rate", rate)
    chosen = routing.experts.detach().flatten().to(torch.int64)
    counts = torch.zeros_like(bias, requires_grad=False).scatter_add(0, chosen, torch.ones_like(chosen, dtype=bias.dtype))
    with torch.no_grad():
        return bias.add_((counts.mean() - counts).sign(), alpha=rate)


def _check(routing: Any, alpha: Any, groups: Any) -> tuple[Tensor, Tensor, float, int | None]:
    _check_routing(routing)
    if routing.scores is None:
        raise InvalidInput("routing has no scores; the balance loss needs the scores (..., E) that route returns")
    E = routing.scores.shape[-1]
    if groups is not None:
        groups = check_count("groups", groups)
        if E % groups:
            raise InvalidInput(f"groups is {groups} and there are {E} experts; must divide that")
    return routing.experts.detach().to(torch.int64), routing.scores, check_number("alpha", alpha), groups


def _check_routing(routing: Any) -> None:
    if not isinstance(routing, Routing):
        raise InvalidInput(f"routing is {shown(routing)}; must be the Routing that route returns")


def _places_of_batch(experts: Tensor) -> tuple[Tensor, int]:
    """The sequence of each token, and the number of sequences, of (T, K) or (B, ..., T, K)."""
    B, T = experts.shape[:-2].numel(), experts.shape[-2] if experts.ndim > 1 else 1
    return torch.arange(B, device=experts.device).repeat_interleave(T, output_size=B * T), B


def _places_of_packed(experts: Tensor, cu: Tensor) -> tuple[Tensor, int]:
    if experts.ndim != 2:
        raise InvalidInput(f"routing has experts {tuple(experts.shape)}; with cu they must be packed (total, K)")
    cu = check_offsets("cu", cu, experts.shape[0], "tokens", experts.device, False)
    rows = torch.arange(experts.shape[0], dtype=cu.dtype, device=cu.device)
    return torch.searchsorted(cu[1:], rows, right=True), cu.shape[0] - 1
