"""The study: each method learns recall at several learning rates, of which the best counts, and English at one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rooftile.models import TrainableDecoder
from rooftile_lab.bench.learning.english import BYTES, English
from rooftile_lab.bench.learning.methods import decoder_of
from rooftile_lab.bench.learning.recall import Recall, by_distance, right
from rooftile_lab.bench.learning.training import Trained, autocast, train

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of the study, the same for all methods."""

    task: Recall
    hidden: int
    heads: int
    layers: int
    batch: int
    steps: int
    rates: tuple[float, ...]  # for recall
    tests: int  # texts per number of pairs, or depth
    english_steps: int
    english_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """How well a method recalls, trained at its best learning rate."""

    method: str
    model: TrainableDecoder
    rate: float
    by_rate: dict[float, float]  # recall over all tests
    by_pairs: dict[int, float]
    by_distance: dict[int, float]  # by the upper end of a range
    trained: Trained

    @property
    def recall(self) -> float:
        return self.by_rate[self.rate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """How well a method predicts the next byte of held-out text, in nats per byte."""

    method: str
    loss: float
    frequencies_loss: float  # the same by the frequencies of bytes alone
    parameters: int
    trained: Trained


def learn_recall(method: str, plan: Plan, device: torch.device, say: Say) -> Recalled:
    """Trains a method at each learning rate, from the same weights on the same texts, and keeps the best.

    Raises:
        ArithmeticError: no rate gave a finite loss.
    """
    best: Recalled | None = None
    by_rate: dict[float, float] = {}
    for rate in plan.rates:
        say(f"recall, {method}, learning rate {rate:g}: {plan.steps} steps")
        found = _at_rate(method, plan, rate, device)
        by_rate[rate] = found.recall
        if found.trained.is_finite and (best is None or found.recall > best.recall):
            best = found
    if best is None:
        raise ArithmeticError(f"the loss of {method} is not finite at any of the learning rates {plan.rates}")
    return Recalled(
        method=method, model=best.model, rate=best.rate, by_rate=by_rate, by_pairs=best.by_pairs, by_distance=best.by_distance,
        trained=best.trained,
    )  # fmt: skip


def _at_rate(method: str, plan: Plan, rate: float, device: torch.device) -> Recalled:
    task = plan.task
    model = _made(method, plan, task.vocab_size, device)
    generator = torch.Generator(device).manual_seed(1)
    trained = train(model, lambda: task.draw(plan.batch, generator)[:2], steps=plan.steps, rate=rate, device=device)
    # the same tests for every method
    generator.manual_seed(2)
    model.eval()
    rights, distances, by_pairs = [], [], {}
    for pairs in task.pairs:
        batch = task.draw_with(pairs, plan.tests, generator)
        with torch.no_grad(), autocast(device):
            rights.append(right(model(batch.tokens), batch))
        distances.append(batch.distances[batch.distances > 0])
        by_pairs[pairs] = rights[-1].float().mean().item()
    shares = by_distance(torch.cat(rights), torch.cat(distances), task.buckets())
    # every number of pairs counts alike
    recall = sum(by_pairs.values()) / len(by_pairs)
    return Recalled(
        method=method, model=model, rate=rate, by_rate={rate: recall}, by_pairs=by_pairs, by_distance=shares, trained=trained
    )


def learn_english(method: str, plan: Plan, text: English, device: torch.device, say: Say) -> Read:
    """Trains a method to predict the next byte, and tests it on held-out text.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    say(f"English, {method}: {plan.english_steps} steps")
    model, length = _made(method, plan, BYTES, device), plan.task.length
    generator = torch.Generator(device).manual_seed(1)
    trained = train(
        model, lambda: text.draw(plan.batch, length, generator), steps=plan.english_steps, rate=plan.english_rate, device=device
    )
    if not trained.is_finite:
        raise ArithmeticError(f"the loss of {method} is not finite at the learning rate {plan.english_rate}")
    model.eval()
    tokens, targets = text.tests(plan.tests, length)
    with torch.no_grad(), autocast(device):
        loss = loss_of(model(tokens), targets)
    return Read(
        method=method, loss=loss, frequencies_loss=loss_of(_frequencies(text.train).expand(*targets.shape, BYTES), targets),
        parameters=model.parameter_count, trained=trained,
    )  # fmt: skip


def _made(method: str, plan: Plan, vocab_size: int, device: torch.device) -> TrainableDecoder:
    sizes = {"heads": plan.heads, "hidden": plan.hidden, "layers": plan.layers, "length": plan.task.length}
    return decoder_of(method, vocab_size, **sizes).to(device)


def _frequencies(text: Tensor) -> Tensor:
    """The log-probabilities of bytes by how often they stand in a text, one more of each."""
    counts = torch.bincount(text, minlength=BYTES) + 1.0
    return (counts / counts.sum()).log()


def loss_of(logits: Tensor, targets: Tensor) -> float:
    """Returns the mean loss in nats."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten()).item()
