"""`Mixer`: what a kind of layer brings to an engine.

An engine sees layers in kinds, and of each kind a mixer. To add a kind of layer is to write a mixer and to enter it into
`rooftile.engine.mixers.registry.MIXERS`: scheduler, runner, memory and warm-up ask the mixer, and know no kind by its name.

    made         before weights are read: checks the settings, says what the layers keep (`specs`) and what a step takes
    trials       while weights are read: runs its kernels, so that they are compiled
    begin        with the weights and the caches
    on           for each step: returns what mixes the tokens of its layers
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.mixers.trial import TrialSetup
from rooftile.engine.settings.config import EngineConfig
from rooftile.exact.spec import CallSettings
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec
from rooftile.models import Attend, Decoder, ModelConfig


class Largest(NamedTuple):
    """The largest step of an engine, whose memory is to be kept free."""

    length: int  # tokens of the longest sequence
    answers: int  # the most answers that run at once
    tokens: int  # the most tokens that a step reads
    dtype: torch.dtype  # the dtype of the cache
    computed: torch.dtype  # the dtype that the model computes in
    device: torch.device


class Mixer(ABC):
    """A kind of layer in an engine; one object serves all layers of the kind in a model.

    A layer with a `State` finds the state of the answer in slot n in row n of `Caches.states`, reads and writes it in place.
    Before the first token of a sequence the state is zero. After a prefix that was found, a fork, or a preemption it is the
    state after the token before the step's first one of this sequence: the engine copies it there. It reads the chunks of a step
    in the rounds of `StepTokens.rounds`: sequences that begin with the states of some rows and leave theirs in others.

    Args:
        shape: the model, with the dtype that it computes in.
        layers: the numbers of the layers of this kind, rising.
        config: the settings of the engine.

    Raises:
        InvalidInput: a setting does not go with layers of this kind; the sentence says which one and why.
        Unsupported: the same, for what is not supported.
    """

    kernels: ClassVar[tuple[str, ...]] = ()
    """The modules with its kernels, which one thread imports before several compile."""

    separates_prompts: ClassVar[bool] = False
    """Whether a prompt's tokens are computed otherwise than an answer's, whatever a step reads together."""

    takes_drafts: ClassVar[bool] = False
    """Whether tokens can be drafted: whether several single tokens of a sequence may be read in one step, and what is kept of
    them be written again."""

    captures: bool = True
    """Whether steps that only decode can be captured in graphs: whether no size in them depends on their lengths."""

    def __init__(self, shape: ModelConfig, layers: tuple[int, ...], config: EngineConfig) -> None:
        self.shape, self.layers, self.config = shape, layers, config

    @property
    def most_blocks(self) -> int:
        """The most blocks that a cache may have."""
        return 1 << 31

    @abstractmethod
    def specs(self) -> tuple[CacheSpec, ...]:
        """Returns what its layers keep."""

    def check_decoder(self, decoder: Decoder) -> None:  # noqa: B027  (most mixers check nothing)
        """Raises InvalidInput if the weights are not those that it was made for."""

    def working_bytes(self, largest: Largest) -> int:
        """Returns the bytes that one of its layers takes in a step, besides what the model takes."""
        return 0

    @abstractmethod
    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        """Takes the weights and the caches, once, before the first step.

        Args:
            decoder: the model.
            caches: the memory of what `specs` says.
            settings: scale, softcap and the like.
        """

    @abstractmethod
    def on(self, step: StepTokens) -> Attend:
        """Returns what mixes the tokens of its layers in one step."""

    @classmethod
    def trials(cls, trial: TrialSetup) -> Sequence[Callable[[], None]]:
        """Returns the jobs that compile its kernels, longest first."""
        return ()
