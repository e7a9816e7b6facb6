"""Runs a layer of latent attention for the sake of its kernels, on a cache of one block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.mixers.trial import ROWS, TrialSetup
from rooftile.engine.steps.step_inputs import Chunks, StepInputs
from rooftile.exact.spec import CallSettings
from rooftile.kvcache import Copy
from rooftile.models import Decoder

# tokens of a sequence that is read in parts
LONG = 4096


class LatentTrial:
    """A layer and its cache. It runs an engine's steps, whose tokens lie in the first block.

    Args:
        trial: the engine that is being built.
        mixer: of the one layer of `decoder`.
        decoder: a model of one layer.
    """

    def __init__(self, trial: TrialSetup, mixer: Mixer, decoder: Decoder) -> None:
        self.size, self.device, self.mixer, self.decoder = trial.size, trial.device, mixer, decoder
        # one block to read and write, and one to copy it to
        layout = CacheLayout(self.size, mixer.specs())
        self.caches = layout.allocate(2, PeakLoad(answers=1, tokens=1), trial.dtype, self.device)
        mixer.begin(decoder, self.caches, CallSettings(decoder.config.scale))

    def jobs(self, lengths: Iterable[int]) -> list[Callable[[], None]]:
        """Returns runs of a prompt of each length, and of single tokens."""
        # a short sequence is read whole, and a long one in parts
        return [*(partial(self.read_prompt, tokens) for tokens in lengths), self.decode, partial(self.decode, LONG)]

    def read_prompt(self, tokens: int) -> None:
        """Runs a prompt."""
        places, zeros = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64)
        none, ends = zeros[:0], torch.tensor([0, tokens])
        on_host = StepInputs(zeros, places, zeros, none, none, none, ends, ends[1:], zeros[:1])
        table = torch.zeros(1, -(-tokens // self.size), dtype=torch.int32, device=self.device)
        cells, cu_q = (x.to(self.device) for x in (zeros, ends.int()))
        self._run(StepTokens(self.size, cells, cells, cells, table, Chunks(tokens, table, cu_q[1:], cu_q), None, on_host))

    def decode(self, room: int = 1) -> None:
        """Runs a step of single tokens, whose tables have columns for `room` tokens, and copies of blocks."""
        self.caches.prepare([Copy(0, 1)], {}, [], {})
        cells = torch.zeros(ROWS, dtype=torch.int64, device=self.device)
        table = torch.zeros(ROWS, -(-room // self.size), dtype=torch.int32, device=self.device)
        self._run(StepTokens(self.size, cells, cells, cells, table, None, (table, cells.int() + 1), None))

    def _run(self, step: StepTokens) -> None:
        x = torch.zeros(len(step.cells), self.decoder.config.hidden, dtype=self.decoder.embedding.dtype, device=self.device)
        rotation = self.decoder.rotation(step.positions.clamp(max=ROWS - 1))
        self.decoder.layers[0].mix(0, x, rotation, self.mixer.on(step))
