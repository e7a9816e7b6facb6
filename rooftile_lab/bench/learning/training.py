"""Trains one small decoder: AdamW, a warm-up, a cosine, and the same steps for every method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rooftile.models import TrainableDecoder
from rooftile_lab.bench.learning.recall import NOTHING

# a draw of tokens (B, T) and of what is due after each, (B, T) with NOTHING where nothing is
Draw = Callable[[], tuple[Tensor, Tensor]]
WARM_UP = 0.1
# the clock is read this often, so that reading it costs nothing
READINGS = 10


@dataclass(frozen=True, slots=True)
class Trained:
    """How a training went."""

    losses: list[float]  # nats, one per step
    step_us: list[float]  # means over a part of the steps each, without the first part, in which kernels are compiled

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses))


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """The precision of the study: bf16 on a GPU, fp32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def train(
    model: TrainableDecoder, draw: Draw, *, steps: int, rate: float, device: torch.device,
    after: Callable[[int], None] = lambda steps: None, alpha: float = 0.0,
) -> Trained:  # fmt: skip
    """Trains a model in place.

    `rate` is the highest learning rate; `alpha` is the factor of the experts' balance loss, which is left out if it is 0; `after`
    is called with the number of steps taken so far.
    """
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
    losses: list[Tensor] = []
    part = max(steps // READINGS, 1)
    marks = [_now(device)]
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * _share(step, steps)
        losses.append(_step(model, optimiser, *draw(), device, alpha))
        after(step + 1)
        if (step + 1) % part == 0:
            marks.append(_now(device))
    taken = [(after - before) / part * 1e6 for before, after in pairwise(marks)]
    return Trained(torch.stack(losses).tolist(), taken[1:] or taken)


def _step(
    model: TrainableDecoder, optimiser: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, device: torch.device, alpha: float
) -> Tensor:
    with autocast(device):
        logits = model(tokens)
    loss = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=NOTHING)
    others = [model.mixers_loss(), model.balance_loss(alpha) if alpha else None]
    torch.stack([loss, *(other for other in others if other is not None)]).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss.detach()


def _share(step: int, steps: int) -> float:
    """The share of the highest rate: it rises over the warm-up, and falls to nothing along a cosine."""
    warm = max(WARM_UP * steps, 1)
    if step < warm:
        return (step + 1) / warm if step + 1 < warm else 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
