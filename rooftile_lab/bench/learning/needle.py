"""Loki on a trained model: the last token of a text, decoded with few keys, asks for a pair at a given depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap
from rooftile.models import TrainableDecoder
from rooftile_lab.bench.learning.recall import Recall, right
from rooftile_lab.bench.learning.training import autocast

DEPTHS = tuple(range(5, 100, 10))  # in percent
DIMS, KEEP, PAGE = 0.25, 0.125, 4
WAYS = ("exact", "loki-token", "loki-page")
# computes the output (B, 1, H, D) of the last query
Decode = Callable[[Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def calibrated(model: TrainableDecoder, tokens: Tensor) -> list[ap.Loki]:
    """Fits a rotation to each layer's rotated keys of calibration texts (B, T)."""
    found, stream = [], model.embedding(tokens)
    with autocast(tokens.device):
        for layer in model.layers:
            _, k, _ = layer.mixer.project(layer.attention_norm(stream))
            found.append(ap.Loki.fit(k.float(), dims=DIMS, keep=KEEP))
            stream = layer(stream)
    return found


@torch.no_grad()
def decode(model: TrainableDecoder, tokens: Tensor, ways: Sequence[Decode | None]) -> Tensor:
    """The logits of the last token (B, 1, vocab); `ways` compute its attention in each layer, None exactly.

    The tokens before are read with exact attention, as a prompt is before decoding.
    """
    stream = model.embedding(tokens)
    with autocast(tokens.device):
        for layer, way in zip(model.layers, ways, strict=True):
            q, k, v = layer.mixer.project(layer.attention_norm(stream))
            o = rt.attention(q, k, v, rt.CAUSAL)
            if way is not None:
                o = torch.cat([o[:, :-1], way(q[:, -1:], k, v)], dim=1)
            stream = layer.feed_forward(stream + layer.mixer.out(o.flatten(-2)))
        return model.head(model.norm(stream[:, -1:]))


def needles(model: TrainableDecoder, task: Recall, texts: int, generator: torch.Generator) -> dict[str, dict[int, float]]:
    """The recall of each way by depth, for a model whose mixers are exact attention."""
    model.eval()
    lokis = calibrated(model, task.draw(16, generator).tokens)
    ways: dict[str, list[Decode | None]] = {"exact": [None] * len(lokis)}
    for unit in ("token", "page"):
        ways[f"loki-{unit}"] = [_by(loki, unit) for loki in lokis]
    found: dict[str, dict[int, float]] = {way: {} for way in WAYS}
    for depth in DEPTHS:
        batch = task.with_needle(depth / 100, texts, generator)
        last = batch._replace(targets=batch.targets[:, -1:])
        for way in WAYS:
            found[way][depth] = right(decode(model, batch.tokens, ways[way]), last).float().mean().item()
    return found


def _by(loki: ap.Loki, unit: str) -> Decode:
    return lambda q, k, v: loki.attend(q, k, v, unit=unit, page=PAGE)
