"""Exact attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from rooftile.engine.mixers.exact.masks import masks_of
from rooftile.engine.mixers.exact.step import ExactStep
from rooftile.engine.mixers.exact.trials import trials
from rooftile.engine.mixers.mixer import Largest, Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.mixers.trial import TrialSetup
from rooftile.exact.paged_route import MOST_GATHERED, route
from rooftile.exact.spec import CallSettings, Options
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec, PagedKeys
from rooftile.models import Attend, Decoder
from rooftile.models.attention_layer import AttentionLayer


class ExactMixer(Mixer):
    """Layers with exact attention, with or without windows; each keeps all its keys and values."""

    takes_drafts: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = (
        "exact.backends.triton.paged_decode", "exact.backends.triton.paged_fwd", "exact.backends.triton.flash_fwd",
        "kvcache.page_kernels",
    )  # fmt: skip

    def specs(self) -> tuple[CacheSpec, ...]:
        return (PagedKeys(self.layers, self.shape.kv_heads, self.shape.head_dim),)

    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        self.caches, self.settings, self.masks = caches, settings, masks_of(decoder.config)
        sinks = {n: layer.sinks for n, layer in enumerate(decoder.layers) if isinstance(layer, AttentionLayer)}
        self.options = {n: Options(sinks=x) for n, x in sinks.items() if x is not None}

    def on(self, step: StepTokens) -> Attend:
        return ExactStep(self.caches, self.masks, self.settings, step, self.options)

    def working_bytes(self, largest: Largest) -> int:
        return gathered_bytes(2 * self.shape.kv_heads * self.shape.head_dim, self.config.block_size, largest)

    @classmethod
    def trials(cls, trial: TrialSetup) -> Sequence[Callable[[], None]]:
        return trials(trial)


def most_gathered(size: int, dtype: torch.dtype, *, tokens: int, answers: int) -> int:
    """Returns how many prompts one step may at most read from a gathered copy.

    Args:
        size: tokens per block.
        dtype: the dtype of the KV cache.
        tokens: the most tokens that a step reads.
        answers: the most answers that run at once.
    """
    fp8 = dtype == torch.float8_e4m3fn
    return next((n for n in range(answers, 0, -1) if route(tokens, n, size, fp8=fp8, copy_bytes=0).gather), 0)


def gathered_bytes(numbers: int, size: int, largest: Largest) -> int:
    """Returns the bytes of the copies of prompts that a layer reads in a step, of `numbers` numbers a token."""
    copied = most_gathered(size, largest.dtype, tokens=largest.tokens, answers=largest.answers)
    return min(copied * largest.length * numbers * largest.computed.itemsize, MOST_GATHERED)
