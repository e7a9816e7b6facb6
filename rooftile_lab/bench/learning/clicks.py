"""Models that learn which candidates a user clicks, from the last n events: the methods of the study of users' histories."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile.recommend import HSTURecommender, TargetRecommender
from rooftile.recommend.data import Events, planted_clicks
from rooftile.recommend.data.clicks import Clicks
from rooftile.recommend.metrics import auc

METHODS: dict[str, dict[str, Any]] = {
    "din": {},
    "sim-soft": {"search": "embedding"},
    "sim-hard": {"search": "category"},
    "eta": {"search": "lsh"},
    # buckets of ages up to years, as 4,096 events lie back
    "twin": {"search": "exact", "buckets": 64},
    "hstu": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps on users of one length, in batches."""

    length: int
    steps: int
    users: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The task, the sizes of the models, and how they are trained: a stage goes on with the model of the one before.

    Users are tested with `whole` events, of which a model reads the last `length`; the time is of a batch of `timed_users`.
    """

    stages: tuple[Stage, ...]
    whole: int
    rate: float = 1e-2
    candidates: int = 32
    test_users: int = 64
    test_candidates: int = 64
    timed_users: int = 8
    dim: int = 32
    heads: int = 2
    top_k: int = 16
    bits: int = 64
    categories: int = 16
    groups: int = 4
    per_group: int = 2

    def drawn(self, users: int, length: int, candidates: int, generator: torch.Generator) -> Clicks:
        """Users, candidates and clicks, on the host, so that every device gets the same ones."""
        return planted_clicks(
            users, length, candidates=candidates, generator=generator, categories=self.categories, groups=self.groups,
            per_group=self.per_group,
        )  # fmt: skip


class HSTURanker(nn.Module):
    """A layer of HSTU that reads candidates as targets, and one output for each."""

    def __init__(self, items: int, plan: Plan) -> None:
        super().__init__()
        longest = plan.whole + max(plan.candidates, plan.test_candidates)
        self.trunk = HSTURecommender(items, dim=plan.dim, heads=plan.heads, layers=1, longest=longest, buckets=0, dropout=0.0)
        for layer in self.trunk.layers:
            # the user's rows divide, which become more from stage to stage
            layer.scale = None  # type: ignore[assignment]
        self.head = nn.Linear(plan.dim, 1)

    def forward(self, events: Tensor, cu: Tensor, candidates: Tensor) -> Tensor:
        """Returns logits (B, M)."""
        device, (users, shown) = events.device, candidates.shape
        before = shown * torch.arange(users + 1, device=device)
        user = torch.repeat_interleave(torch.arange(users, device=device), cu.diff(), output_size=events.shape[0])
        at = (cu[1:] + before[:-1])[:, None] + torch.arange(shown, device=device)
        rows = events.new_empty(events.shape[0] + candidates.numel())
        rows[torch.arange(events.shape[0], device=device) + before[user]] = events
        rows[at] = candidates
        return self.head(self.trunk(rows, cu + before, targets=shown)[at])[..., 0]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A method after a stage: its model, and how well it tells clicks of users that it reads for `length` events.

    `auc` counts all candidates, `within` those whose interest lies in the events that are read, or nowhere, and `far` those whose
    interest lies in the oldest three quarters of the whole history, or nowhere. `possible` is the AUC of one who knows which
    interests the events that are read have, and guesses the rest.
    """

    length: int
    model: nn.Module
    auc: float
    within: float
    far: float
    possible: float
    train_s: float


def model_of(method: str, plan: Plan) -> nn.Module:
    """An untrained model, on the host."""
    clicks = plan.drawn(1, plan.stages[0].length, 1, torch.Generator().manual_seed(0))
    if method == "hstu":
        return HSTURanker(clicks.events.item_count, plan)
    words = dict(METHODS[method])
    if "search" in words:
        words["top_k"] = plan.top_k
    if words.get("search") == "lsh":
        words["bits"] = plan.bits
    return TargetRecommender(
        clicks.events.item_count, categories=clicks.categories, dim=plan.dim, heads=plan.heads, weights="silu", **words
    )


def moved(events: Events, device: torch.device) -> Events:
    """The events on a device."""
    return Events(events.items.to(device), events.cu.to(device), events.times.to(device), events.item_count)


def logits(method: str, model: nn.Module, events: Events, candidates: Tensor) -> Tensor:
    """The logits of candidates (B, M), all on the model's device."""
    times = (events.times,) if "buckets" in METHODS[method] else ()
    found: Tensor = model(events.items, events.cu, candidates, *times)
    return found


def learn(method: str, plan: Plan, device: torch.device, seed: int = 0) -> Iterator[Learned]:
    """Trains a method stage by stage, and tests it after each. The model goes on to the next stage when the next is asked for."""
    torch.manual_seed(seed)
    model = model_of(method, plan).to(device)
    test = plan.drawn(plan.test_users, plan.whole, plan.test_candidates, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    for stage in plan.stages:
        seconds = _train(method, model, plan, stage, generator, device)
        scores = _scores(method, model, test.events.last(stage.length), test.candidates, device)
        read = test.distance <= stage.length
        far = (test.distance == 0) | (test.distance > plan.whole // 4)
        known = test.labels & read
        yield Learned(
            length=stage.length, model=model, auc=auc(scores.flatten(), test.labels.flatten()), train_s=seconds,
            within=auc(scores[read], test.labels[read]), far=auc(scores[far], test.labels[far]),
            possible=auc(known.flatten().float(), test.labels.flatten()),
        )  # fmt: skip


def _scores(method: str, model: nn.Module, events: Events, candidates: Tensor, device: torch.device) -> Tensor:
    """The logits of all users (B, M), on the host."""
    with torch.no_grad():
        parts = (
            logits(method, model, moved(events.of_users(some), device), candidates[some].to(device))
            for some in torch.arange(len(candidates)).split(8)
        )
        return torch.cat([part.cpu() for part in parts])


def _train(
    method: str, model: nn.Module, plan: Plan, stage: Stage, generator: torch.Generator, device: torch.device
) -> float:  # fmt: skip
    """Trains a stage; returns the seconds that its steps took."""
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, plan.rate, total_steps=stage.steps, pct_start=0.1)
    seconds = 0.0
    for _ in range(stage.steps):
        clicks = plan.drawn(stage.users, stage.length, plan.candidates, generator)
        events, candidates, labels = (moved(clicks.events, device), clicks.candidates.to(device), clicks.labels.to(device))
        begin = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(logits(method, model, events, candidates), labels.float())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rates.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds += time.perf_counter() - begin
    return seconds


def bytes_read(method: str, plan: Plan, length: int) -> int:
    """The least bytes that scoring a user reads where keys, values, hashes and categories of its events are kept, in fp32.

    A search reads of each event what it compares, and for each candidate the keys and values of the events that it found.
    """
    row = 4 * plan.dim
    gathered = plan.test_candidates * min(plan.top_k, length) * 2 * row
    searched = {"sim-soft": row, "sim-hard": 8, "eta": plan.heads * plan.bits // 8, "twin": row + 8}
    return length * searched[method] + gathered if method in searched else length * 2 * row
