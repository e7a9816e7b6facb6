"""Exact attention to a cache whose tokens lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from rooftile.engine.mixers.exact.context_step import ContextLayers, ContextStep, merged_bytes
from rooftile.engine.mixers.exact.merging import merge
from rooftile.engine.mixers.exact.mixer import ExactMixer
from rooftile.engine.mixers.exact.own_keys import OwnKeys, most_blocks
from rooftile.engine.mixers.mixer import Largest
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.mixers.trial import TrialSetup
from rooftile.engine.settings.config import EngineConfig
from rooftile.errors import Unsupported
from rooftile.exact.spec import CallSettings
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import PagedKeys
from rooftile.models import Attend, Decoder, ModelConfig


class ContextMixer(ExactMixer):
    """Layers with exact attention, with or without windows, that keep the keys and values of a share of the tokens."""

    def __init__(self, shape: ModelConfig, layers: tuple[int, ...], config: EngineConfig) -> None:
        super().__init__(shape, layers, config)
        longest, block = min(shape.max_len, config.max_model_len or shape.max_len), config.block_tokens
        self.windows = tuple(None if window is None or window >= longest else window for window in shape.windows)
        misfit = next((window for window in self.windows if window is not None and window % block), None)
        if misfit is not None:
            ranks, size = config.context_parallel_size, config.block_size
            raise Unsupported(
                f"context_parallel_size is {ranks} and block_size {size}, and a layer has a window of {misfit:,} tokens; the "
                f"product, {block:,}, must divide it: choose smaller numbers"
            )

    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        super().begin(decoder, caches, settings)
        assert caches.share is not None
        own = OwnKeys(
            caches.share, heads=self.shape.kv_heads, group=self.shape.heads // self.shape.kv_heads, dim=self.shape.head_dim,
            tokens=self.config.max_batched_tokens, chunks=self.config.max_num_seqs, dtype=caches.pages.storage.dtype,
            device=caches.pages.storage.device,
        )  # fmt: skip
        sinks = {n: found.sinks for n, found in self.options.items() if found.sinks is not None}
        parts = settings._replace(partial=True)
        self.shared = ContextLayers(caches, self.windows, parts, sinks, own)

    def on(self, step: StepTokens) -> Attend:
        return ContextStep(self.shared, step)

    @classmethod
    def trials(cls, trial: TrialSetup) -> Sequence[Callable[[], None]]:
        return [*super().trials(trial), partial(_try_merge, trial)]

    def working_bytes(self, largest: Largest) -> int:
        shape, ranks = self.shape, self.config.context_parallel_size
        heads = -(-shape.kv_heads // ranks)
        own = PagedKeys((0,), heads, shape.head_dim).block_bytes(self.config.block_size, largest.dtype)
        kept = own * most_blocks(largest.tokens, largest.answers, self.config.block_size)
        # a rank's longest part of a sequence
        here = largest._replace(length=-(-largest.length // ranks) + self.config.block_size)
        return super().working_bytes(here) + kept + merged_bytes(largest.tokens, shape.heads, shape.head_dim, ranks)


def _try_merge(trial: TrialSetup) -> None:
    """Runs the merge, so that its kernel is compiled."""
    config = trial.config
    parts = torch.zeros(trial.context_ranks, 1, config.heads, config.head_dim + 1, device=trial.device)
    sinks = torch.zeros(config.heads, dtype=trial.dtype, device=trial.device) if config.sinks else None
    merge(parts, sinks, trial.dtype)
