"""Runs a layer of Native Sparse Attention for the sake of its kernels, on a cache of one block."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from rooftile.engine.attention.layout import CacheLayout
from rooftile.engine.attention.native_sparse import SparseAttention
from rooftile.engine.attention.step import Step
from rooftile.engine.step_inputs import Chunks, StepInputs
from rooftile.models import Decoder, ModelConfig
from rooftile.models.mixers import BRANCHES


class SparseLayer:
    """A layer and its cache; the steps are those of an engine, and everything in them is padding or in the first block.

    Args:
        config: a model of one layer.
        dtype: the dtype of weights and cache.
        device: a GPU.
        size: tokens per block of the cache.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, size: int) -> None:
        config = replace(config, mixers=("native_sparse",))
        self.decoder = Decoder(config, dtype=dtype, device=device)
        self.attention = SparseAttention(self.decoder, CacheLayout.of(config, size).allocate(1, 1, dtype, device))
        self.size, self.device = size, device

    def read_prompts(self, lengths: Collection[int]) -> None:
        """Runs a prompt of each length."""
        for tokens in lengths:
            places, zeros = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64)
            none, ends = zeros[:0], torch.tensor([0, tokens])
            on_host = StepInputs(zeros, places, zeros, none, none, none, ends, ends[1:], zeros[:1])
            table = torch.zeros(1, -(-tokens // self.size), dtype=torch.int32, device=self.device)
            positions, slots, ends = (x.to(self.device) for x in (places, zeros, ends.int()))
            chunks = Chunks(tokens, table, ends[1:], ends)
            self._run(Step(self.size, slots - 1, positions, slots, table, chunks, None, on_host))

    def decode(self, rows: int) -> None:
        """Runs a step of single tokens, as a graph has it."""
        padding, slots = torch.full((2, rows), -1, device=self.device)
        table = torch.zeros(rows, 1, dtype=torch.int32, device=self.device)
        single = table, padding.int() + 1
        self._run(Step(self.size, padding, padding, slots + 1, table, None, single, None))

    def _run(self, step: Step) -> None:
        tokens, config = step.cells.shape[0], self.decoder.config
        heads = (config.heads, BRANCHES * config.kv_heads, BRANCHES * config.kv_heads)
        dtype, device = self.decoder.embedding.dtype, self.device
        # a layer's projection leaves its results side by side, too
        q, k, v = torch.zeros(tokens, sum(heads), config.head_dim, dtype=dtype, device=device).split(heads, dim=1)
        gates = torch.zeros(tokens, config.heads, BRANCHES, dtype=dtype, device=device)
        self.attention.on(step)(0, q, k, v, self.decoder.rotation(step.slots), gates)
