"""The losses of approximate methods: on Gaussian tensors, on a needle, and on a user's own q, k and v. Nothing here is trained.

The error is |o - exact| / |exact|, against exact attention of the queries and keys as a method changes them (Reformer's keys are
its queries, Routing's are layer-normed). A method that was trained with a model learns to lose less.

A needle is a key that the last query must find: all other scores are small beside its own. It lies at ten depths of the text in
turn. It is found if no other token's value is nearer in direction to the output than the needle's; the recall is the share of
depths and heads at which it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL
from rooftile_lab.bench.accuracy import QKV
from rooftile_lab.bench.methods.check import relative
from rooftile_lab.bench.methods.table import WAYS, WHOLE
from rooftile_lab.bench.methods.way import Sizes, Way, drawn

DEPTHS = 10
# the needle's score, where the scores of other keys have a standard deviation of SHARPNESS / sqrt(D)
SHARPNESS = 20.0
# the row of exact attention in a table
EXACT = "exact"
SHORTEST = 64
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of one method. A number that was not asked for, or that a method does not have, is None.

    Attributes:
        method: the name of a way, or "exact".
        gaussian: mean error over draws.
        found: share of heads that found the needle, by depth from the text's beginning to its end.
        own: error on the user's tensors.
        reason: why there is no number for the user's tensors.
    """

    method: str
    gaussian: float | None = None
    found: tuple[float, ...] = ()
    own: float | None = None
    reason: str = ""

    @property
    def recall(self) -> float | None:
        """The share of depths and heads at which the needle was found."""
        return statistics.mean(self.found) if self.found else None


def losses(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, *, ways: Sequence[Way] | None = None, draws: int = 2,
    own: QKV | None = None, say: Say = lambda words: None,
) -> list[Loss]:  # fmt: skip
    """The losses of exact attention in this dtype, and of each way.

    Args:
        sizes: of the Gaussian tensors and of the texts with a needle; B is 1.
        device: where to compute.
        dtype: of all tensors that are drawn.
        ways: the methods; one each if None.
        draws: of Gaussian tensors.
        own: a user's q (B, T, H, D), k and v (B, T, Hk, D).
        say: called with each step.
    """
    if sizes.N < SHORTEST:
        raise InvalidInput(f"the texts have {sizes.N} tokens; a needle at ten depths needs at least {SHORTEST}")
    if own is not None:
        check_own(own)
    ways = [WAYS[name] for name in WHOLE] if ways is None else ways
    gaussian = [drawn(sizes, device, dtype, seed=seed) for seed in range(draws)]
    say("needle: exact")
    found = [
        Loss(
            method=EXACT, gaussian=statistics.mean(_exact_error(*each) for each in gaussian),
            found=needle(attend_exactly, sizes, device, dtype), own=None if own is None else _exact_error(*own),
        )
    ]  # fmt: skip
    for way in ways:
        say(f"Gaussian tensors: {way.name}")
        error = statistics.mean(error_of(way, *each) for each in gaussian)
        say(f"needle: {way.name}")
        depths = needle(way_of(way), sizes, device, dtype)
        mine, reason = (None, "") if own is None else _own(way, own, say)
        found.append(Loss(method=way.name, gaussian=error, found=depths, own=mine, reason=reason))
    return found


def error_of(way: Way, q: Tensor, k: Tensor, v: Tensor) -> float:
    """|o - exact| / |exact| of a method."""
    with torch.no_grad():
        return relative(way_of(way)(q, k, v), way.target(q, k, v))


def _exact_error(q: Tensor, k: Tensor, v: Tensor) -> float:
    """The rounding of exact attention in the tensors' dtype, beside which a method's error can be read."""
    with torch.no_grad():
        return relative(rt.attention(q, k, v, CAUSAL), rt.attention(q.double(), k.double(), v.double(), CAUSAL))


def _own(way: Way, own: QKV, say: Say) -> tuple[float | None, str]:
    say(f"your tensors: {way.name}")
    try:
        return error_of(way, *own), ""
    except (rt.InvalidInput, rt.Unsupported) as error:
        return None, str(error)


def check_own(own: QKV) -> None:
    """Raises InvalidInput for tensors that are no text attending to itself."""
    q, k, v = own
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip("qkv", own, strict=True))
    if any(x.ndim != 4 for x in own) or q.shape[1] != k.shape[1] or k.shape != v.shape or q.shape[2] % max(k.shape[2], 1):
        raise InvalidInput(f"the tensors are {shapes}; must be q (B, T, H, D), k and v (B, T, Hk, D) of one text, Hk dividing H")
    if q.shape[1] < SHORTEST:
        raise InvalidInput(f"the tensors have {q.shape[1]} tokens; at least {SHORTEST} are due, as methods skip distant ones")


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_exactly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention."""
    return rt.attention(q, k, v, CAUSAL)


def way_of(way: Way) -> Attend:
    """A method as a function of q, k and v."""
    return lambda q, k, v: way.run(way.tensors(q, k, v), way.studied if q.device.type == "cpu" else None)


def needle(attend: Attend, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> tuple[float, ...]:
    """The share of heads that find the needle, by depth. `attend` may return the last row alone."""
    found = []
    for depth in range(DEPTHS):
        place = (2 * depth + 1) * sizes.N // (2 * DEPTHS)
        q, k, v = with_needle(sizes, place, device, dtype, seed=depth)
        with torch.no_grad():
            o = attend(q, k, v)[:, -1]  # (1, H, D)
        values = F.normalize(v.float(), dim=-1).repeat_interleave(sizes.H // sizes.Hk, dim=2)
        nearest = torch.einsum("bhd,bshd->bhs", o.float(), values).argmax(-1)
        # for an output of zeros, or with a NaN, argmax is the first token, where no needle lies
        found.append((nearest == place).double().mean().item())
    return tuple(found)


def with_needle(sizes: Sizes, place: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> QKV:
    """A text whose last query has a score of SHARPNESS with the key at a place, and small ones with all others.

    All other queries are the keys of their heads, so that methods with one projection for both read the same text.
    """
    _, k, v = drawn(sizes, device, torch.float32, seed=seed)
    root = math.sqrt(sizes.D)
    direction = F.normalize(k[:, place], dim=-1)  # (1, Hk, D)
    k[:, place] = root * direction
    q = k.clone()
    q[:, -1] = SHARPNESS * direction
    return q.repeat_interleave(sizes.H // sizes.Hk, dim=2).to(dtype), k.to(dtype), v.to(dtype)
