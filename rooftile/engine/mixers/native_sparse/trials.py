"""Runs a layer of Native Sparse Attention for the sake of its kernels, on a cache of one block."""

from __future__ import annotations

from collections.abc import Collection

import torch

from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.mixers.native_sparse.step import SparseAttention, specs_of
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.mixers.trial import TrialSetup
from rooftile.engine.steps.step_inputs import Chunks, StepInputs
from rooftile.kvcache import Copy
from rooftile.models import Decoder
from rooftile.models.mixers import BRANCHES


class SparseLayer:
    """A layer and its cache. It runs an engine's steps, whose tokens are padding or lie in the first block."""

    def __init__(self, trial: TrialSetup) -> None:
        config, self.size, self.device = trial.small("native_sparse"), trial.size, trial.device
        self.decoder = Decoder(config, dtype=trial.dtype, device=self.device)
        # one block to read and write, and one to copy it to
        layout = CacheLayout(self.size, specs_of(config, (0,), self.size))
        self.caches = layout.allocate(2, PeakLoad(answers=1, tokens=1), trial.dtype, self.device)
        self.attention = SparseAttention(self.decoder, self.caches)

    def read_prompts(self, lengths: Collection[int]) -> None:
        """Runs a prompt of each length."""
        for tokens in lengths:
            places, zeros = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64)
            none, ends = zeros[:0], torch.tensor([0, tokens])
            on_host = StepInputs(zeros, places, zeros, none, none, none, ends, ends[1:], zeros[:1])
            table = torch.zeros(1, -(-tokens // self.size), dtype=torch.int32, device=self.device)
            positions, slots, ends = (x.to(self.device) for x in (places, zeros, ends.int()))
            chunks = Chunks(tokens, table, ends[1:], ends)
            self._run(StepTokens(self.size, slots - 1, positions, slots, table, chunks, None, on_host))

    def decode(self, rows: int) -> None:
        """Runs a step of single tokens, as a graph has it, and copies of blocks."""
        self.caches.prepare([Copy(0, 1)], {}, [], {})
        padding, slots = torch.full((2, rows), -1, device=self.device)
        table = torch.zeros(rows, 1, dtype=torch.int32, device=self.device)
        single = table, padding.int() + 1
        self._run(StepTokens(self.size, padding, padding, slots + 1, table, None, single, None))

    def _run(self, step: StepTokens) -> None:
        tokens, config = step.cells.shape[0], self.decoder.config
        heads = (config.heads, BRANCHES * config.kv_heads, BRANCHES * config.kv_heads)
        dtype, device = self.decoder.embedding.dtype, self.device
        # a layer's projection leaves its results side by side, too
        q, k, v = torch.zeros(tokens, sum(heads), config.head_dim, dtype=dtype, device=device).split(heads, dim=1)
        gates = torch.zeros(tokens, config.heads, BRANCHES, dtype=dtype, device=device)
        self.attention.on(step)(0, q, k, v, self.decoder.rotation(step.slots), gates)
