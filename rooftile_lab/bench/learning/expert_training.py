"""Trains a small decoder with experts, with and without the balance loss, and a dense one of the same active width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rooftile.errors import InvalidInput
from rooftile.models import TrainableDecoder
from rooftile_lab.bench.learning.english import BYTES, English
from rooftile_lab.bench.learning.study import Say, loss_of
from rooftile_lab.bench.learning.training import Trained, autocast, train

BALANCED, UNBALANCED, DENSE = "balanced", "unbalanced", "dense"
KINDS = (DENSE, BALANCED, UNBALANCED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """The sizes of the study. The dense feed-forward is as wide as the experts that a token uses, shared ones included."""

    hidden: int
    heads: int
    layers: int
    experts: int
    active: int
    shared: int
    width: int  # an expert's
    alpha: float  # the factor of the balance loss
    batch: int
    length: int
    steps: int
    rate: float
    tests: int  # pieces of held-out text

    @property
    def active_width(self) -> int:
        return (self.active + self.shared) * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedExperts:
    """How well one of KINDS predicts the next byte, in nats per byte, and how its experts share the held-out tokens."""

    kind: str
    loss: float
    loads: tuple[tuple[float, ...], ...]  # by layer and expert, over the mean load; none for the dense one
    parameters: int
    trained: Trained


def decoder_of(kind: str, plan: ExpertPlan) -> TrainableDecoder:
    """A decoder with random weights; both kinds with experts begin with the same.

    Raises:
        InvalidInput: there is no such kind.
    """
    if kind not in KINDS:
        raise InvalidInput(f"there is no kind {kind!r}; has {', '.join(KINDS)}")
    experts: dict[str, Any] = {
        "name": "experts", "experts": plan.experts, "active": plan.active, "shared": plan.shared, "hidden": plan.width,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TrainableDecoder(
            BYTES, hidden=plan.hidden, heads=plan.heads, layers=plan.layers, ffn=plan.active_width, max_len=plan.length,
            feed_forwards="dense" if kind == DENSE else experts,
        )  # fmt: skip


def learn(kind: str, plan: ExpertPlan, text: English, device: torch.device, say: Say) -> TrainedExperts:
    """Trains a decoder and tests it on held-out text.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    say(f"{kind}: {plan.steps} steps")
    model = decoder_of(kind, plan).to(device)
    generator = torch.Generator(device).manual_seed(1)
    alpha = plan.alpha if kind == BALANCED else 0.0
    trained = train(
        model, lambda: text.draw(plan.batch, plan.length, generator), steps=plan.steps, rate=plan.rate, device=device, alpha=alpha
    )
    if not trained.is_finite:
        raise ArithmeticError(f"the loss of {kind} is not finite at the learning rate {plan.rate}")
    tokens, targets = text.tests(plan.tests, plan.length)
    with torch.no_grad(), autocast(device):
        loss = loss_of(model.eval()(tokens), targets)
    counts = [routing.experts.flatten().bincount(minlength=plan.experts) for routing in model.routings]
    loads = tuple(tuple((count / count.float().mean()).tolist()) for count in counts)
    return TrainedExperts(kind=kind, loss=loss, loads=loads, parameters=model.parameter_count, trained=trained)
