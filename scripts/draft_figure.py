"""Draws what drafts are predicted to gain, by batch and by the share of tokens accepted: the forecast, nothing measured."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from study_figures import beside_each_other

from rooftile.cost.decoder import DecoderCost
from rooftile.drawing import charts
from rooftile.drawing.charts import Series
from rooftile.drawing.page import Chart
from rooftile.engine.caches.cost import weight_bytes
from rooftile.engine.speculation.forecast import Forecast
from rooftile.engine.speculation.settings import USUAL
from rooftile.hardware.chips import chip_named
from rooftile.models import Decoder, ModelConfig
from rooftile_lab.bench.models import MODELS

CHIP, LENGTH = "NVIDIA H100 80GB HBM3", 1000
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = {0.9: "gold", 0.8: "third", 0.7: "rose", 0.5: "standard"}
LARGE, SMALL = "8b", "1b"


def gains() -> str:
    """Draws the gain of look-up, and the gain of a draft model."""
    cost, draft = cost_of(MODELS[LARGE]), cost_of(MODELS[SMALL])
    drawn = [
        chart("By look-up, by the share accepted", "lookup", cost, None),
        chart("By a draft model of 1B, likewise", "draft", cost, draft),
    ]
    title = "Predicted speed with drafts over without, by batch and by the share of tokens accepted"
    words = f"predicted from bytes and FLOPs, not measured: 8B in bf16 on an H100, {LENGTH:,} tokens of context"
    return beside_each_other(drawn, title, words)


def chart(title: str, method: str, cost: DecoderCost, draft: DecoderCost | None) -> Chart:
    """Draws the gain over the batch, a line for each share."""
    series = [
        Series(name=f"{share:.0%}", kind=kind, points=tuple(points_of(method, cost, draft, share)))
        for share, kind in SHARES.items()
    ]
    picture = charts.log_chart(
        series, title=title, y_name="speed over without", x_name="answers at once", write=lambda n: f"{n:.3g}x"
    )
    return Chart(title, picture)


def points_of(method: str, cost: DecoderCost, draft: DecoderCost | None, share: float) -> Iterator[tuple[float, float]]:
    """Yields batches and gains; 1 where the engine makes no drafts."""
    chip = chip_named(CHIP)
    assert chip is not None
    forecast = Forecast(cost, chip.rates("bf16"), draft)
    forecast.accepted = share
    for batch in BATCHES:
        # a step with drafts has at most this many rows for all answers
        tokens = min(USUAL[method], 256 // batch - 1)
        count = forecast.most(batch, batch * LENGTH, tokens) if tokens else 0
        yield float(batch), forecast.gain(batch, batch * LENGTH, count) if count else 1.0


def cost_of(config: ModelConfig) -> DecoderCost:
    """Returns the bytes and FLOPs of a dense decoder in 16 bits, without its memory."""
    decoder = Decoder(config, dtype=torch.bfloat16, device="meta")
    nbytes, numbers = weight_bytes(decoder)
    looked_up = 0 if config.tie else decoder.embedding.nbytes
    token = 2 * 2 * config.layers * config.kv_heads * config.head_dim
    return DecoderCost(weight_bytes=nbytes - looked_up, token_bytes=token, token_flops=2 * numbers)
