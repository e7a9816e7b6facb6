"""Measures what rounding or 2:4 weights cost a small decoder, and what training for them wins back.

A model learns English in full precision. Then copies of it take the same further steps on the same batches: one in full
precision, whose loss is also measured rounded (or masked), and one for each format with rounded weights. With L the loss on
held-out text,

    recovered = (L_rounded - L_trained) / (L_rounded - L_continued)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rooftile import qat
from rooftile.models import TrainableDecoder
from rooftile.weights.two_four import Recipe as Sparsity
from rooftile_lab.bench.learning.english import BYTES, English
from rooftile_lab.bench.learning.study import loss_of
from rooftile_lab.bench.learning.training import autocast, train

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of the study."""

    hidden: int
    heads: int
    layers: int
    ffn: int
    length: int
    batch: int
    steps: int
    rate: float
    further_steps: int
    further_rate: float
    tests: int  # pieces of held-out text


@dataclass(frozen=True, slots=True)
class Recipe:
    """A format to train for: a word of `rooftile.quantise_weight` or None, and options of `rooftile.qat.prepare`."""

    format: str | None
    estimator: str = "straight"
    activations: str | None = None
    sparsity: Sparsity | None = None

    def __str__(self) -> str:
        estimator = self.estimator if self.estimator != "straight" else ""
        sparsity = "" if self.sparsity is None else "2:4 transposable" if self.sparsity.transposable else "2:4"
        return ", ".join(filter(None, (self.format, sparsity, estimator, self.activations and f"activations {self.activations}")))

    def prepare(self, model: TrainableDecoder) -> TrainableDecoder:
        """Prepares a model, but for its head."""
        options = {"estimator": self.estimator, "activations": self.activations, "sparsity": self.sparsity}
        return qat.prepare(model, self.format, skip=("head",), verbose=False, **options)  # type: ignore[arg-type]

    def rounded(self) -> Recipe:
        """Returns the recipe for rounding alone: scales are found from the weights."""
        return replace(self, estimator="straight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Losses of one seed and recipe, in nats per byte."""

    recipe: Recipe
    seed: int
    continued: float  # after the further steps in full precision
    rounded: float  # the same model, rounded or masked
    trained: float  # trained for the format in the further steps

    @property
    def recovered(self) -> float:
        """The share of the loss by rounding that training wins back."""
        return recovered(self.continued, self.rounded, self.trained)


def recovered(continued: float, rounded: float, trained: float) -> float:
    """Returns the share of the loss by rounding that training for the format wins back.

    Example:
        >>> recovered(1.5, 1.7, 1.55)
        0.75
    """
    return round((rounded - trained) / (rounded - continued), 6)


def learn_formats(
    recipes: Sequence[Recipe], plan: Plan, text: English, seed: int, device: torch.device, say: Say
) -> list[Learned]:  # fmt: skip
    """Trains the models of one seed."""
    torch.manual_seed(seed)
    base = decoder_of(plan, plan.length, device)
    say(f"seed {seed}: {plan.steps} steps in full precision")
    take_steps(base, plan.steps, plan.rate, plan, text, seed, device)
    continued = copy.deepcopy(base)
    take_steps(continued, plan.further_steps, plan.further_rate, plan, text, seed + 1000, device)
    full = _tested(continued, plan, text, device)
    found = []
    for recipe in recipes:
        rounded = _tested(recipe.rounded().prepare(continued), plan, text, device)
        qat.restore(continued)
        say(f"seed {seed}, {recipe}: {plan.further_steps} steps with rounded or masked weights")
        model = recipe.prepare(copy.deepcopy(base))
        take_steps(model, plan.further_steps, plan.further_rate, plan, text, seed + 1000, device)
        trained = _tested(model, plan, text, device)
        found.append(Learned(recipe=recipe, seed=seed, continued=full, rounded=rounded, trained=trained))
    return found


def decoder_of(plan: Plan, max_len: int, device: torch.device) -> TrainableDecoder:
    """Returns a decoder of bytes with random weights."""
    model = TrainableDecoder(
        BYTES, hidden=plan.hidden, heads=plan.heads, layers=plan.layers, ffn=plan.ffn, max_len=max_len
    )  # fmt: skip
    return model.to(device)


def take_steps(
    model: TrainableDecoder, steps: int, rate: float, plan: Plan, text: English, seed: int, device: torch.device,
    after: Callable[[int], None] = lambda steps: None,
) -> None:  # fmt: skip
    """Trains a model on batches that follow from the seed; raises ArithmeticError if its loss is not finite."""
    generator = torch.Generator(device).manual_seed(seed)
    trained = train(
        model, lambda: text.draw(plan.batch, plan.length, generator), steps=steps, rate=rate, device=device, after=after
    )
    if not trained.is_finite:
        raise ArithmeticError(f"the loss is not finite at the learning rate {rate}")


def _tested(model: TrainableDecoder, plan: Plan, text: English, device: torch.device) -> float:
    tokens, targets = text.tests(plan.tests, plan.length)
    with torch.no_grad(), autocast(device):
        return loss_of(model.eval()(tokens), targets)
