"""`TrialSetup`: what a mixer knows when it runs its kernels so that they are compiled, on very little memory."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from rooftile.models import ModelConfig

# tokens of prompts: so few that the kernels for prompts are not worth it, and usual ones
SHORT, USUAL = 8, 64
# rows of the decode step
ROWS = 16


class TrialSetup(NamedTuple):
    """An engine that is being built: its model, and what its kernels depend on.

    Args:
        config: the model's configuration.
        dtype: the dtype of weights and computation.
        device: a GPU.
        size: tokens per block of the cache.
        kv_dtype: the dtype of the cache.
        longest: the most tokens of one prompt that a step reads.
        deterministic: whether an engine is (see `batch_invariant`).
        context_ranks: among how many ranks the tokens of a sequence are dealt out.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    size: int
    kv_dtype: torch.dtype
    longest: int
    deterministic: bool = False
    context_ranks: int = 1

    def small(self, mixer: str = "attention") -> ModelConfig:
        """Returns the configuration with one layer: all layers of a kind have the same kernels.

        Embedding and head have no kernels of ours, and experts, which are large, run theirs with the model's own weights.
        """
        n = self.config.mixers.index(mixer)
        dense = "dense" if "dense" in self.config.feed_forwards else None
        return replace(
            self.config, layers=1, windows=(None,), mixers=(mixer,), feed_forwards=(dense,), unrotated=(), vocab_size=1,
            max_len=ROWS, post_normed=(0,) if n in self.config.post_normed else (),
        )  # fmt: skip
