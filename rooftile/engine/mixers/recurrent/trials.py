"""Runs a layer with a recurrence for the sake of its kernels, on the states of a few sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.mixers.trial import ROWS, SHORT, USUAL, TrialSetup
from rooftile.engine.steps.step_inputs import Chunks
from rooftile.exact.spec import CallSettings
from rooftile.models import Decoder


class RecurrentLayer:
    """A layer and its states. It runs an engine's steps, of the first sequence or of all.

    Args:
        trial: the engine that is being built.
        mixer: of the one layer of `decoder`.
        decoder: a model of one layer.
    """

    def __init__(self, trial: TrialSetup, mixer: Mixer, decoder: Decoder) -> None:
        self.mixer, self.decoder, self.size = mixer, decoder, trial.size
        layout, load = CacheLayout(trial.size, mixer.specs()), PeakLoad(ROWS, 1, prefixes=False)
        mixer.begin(decoder, layout.allocate(1, load, trial.dtype, trial.device), CallSettings())

    def jobs(self, longest: int) -> list[Callable[[], None]]:
        """Returns runs of a prompt of each length, and of single tokens."""
        if self.mixer.config.deterministic:
            # prompts are single tokens, too
            return [self.decode]
        lengths = dict.fromkeys((longest, USUAL, SHORT))
        return [*(partial(self.read_prompt, tokens) for tokens in lengths), self.decode]

    def read_prompt(self, tokens: int) -> None:
        """Runs a prompt."""
        device = self.decoder.embedding.device
        table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        cu = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        self._run(torch.zeros(tokens, dtype=torch.int64, device=device), Chunks(tokens, table, cu[1:], cu))

    def decode(self) -> None:
        """Runs a step of single tokens."""
        self._run(torch.arange(ROWS, device=self.decoder.embedding.device), None)

    def _run(self, slots: torch.Tensor, chunks: Chunks | None) -> None:
        table = torch.zeros(ROWS, 1, dtype=torch.int32, device=slots.device)
        step = StepTokens(self.size, slots, slots, slots, table, chunks, None, None)
        x = torch.zeros(len(slots), self.decoder.config.hidden, dtype=self.decoder.embedding.dtype, device=slots.device)
        rotation = self.decoder.rotation(torch.zeros_like(slots))
        self.decoder.layers[0].mix(0, x, rotation, self.mixer.on(step))
