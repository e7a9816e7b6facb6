"""Linear attention and Performer in an engine: the sums over the keys of an answer are its state.

    S = sum f(k) v^T,  z = sum f(k)        and Performer's largest exponent so far

All are in fp32: nothing decays, so a sum grows with the text, and in bf16 a token would change a long one no more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.engine.mixers.mixer import Largest
from rooftile.engine.mixers.recurrent.state_mixer import StateMixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.steps.rounds import Round
from rooftile.errors import Unsupported
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import CallSettings
from rooftile.fused.rope import Rotation, rotate
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec, State
from rooftile.models import Attend, Decoder, LinearSizes, ModelConfig, PerformerSizes
from rooftile.models.layers import Layer
from rooftile.models.linear.performer_layer import PerformerLayer


class Sums(ABC):
    """The sums of all sequences in one layer.

    Args:
        memory: S (rows, Hk, F, D), z (rows, Hk, F), and what else a kind keeps.
        deterministic: whether each token is read by itself.
    """

    def __init__(self, memory: tuple[Tensor, ...], *, deterministic: bool = False) -> None:
        self.memory, self.deterministic = memory, deterministic

    def read(self, part: Round, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns the outputs of the sequences of a round."""
        if self.deterministic:
            # the products of a step add in an order that depends on how many sequences there are
            rows = [slice(n, n + 1) for n in range(len(q))]
            o = torch.cat([self.step(q[n].clone(), k[n].clone(), v[n].clone(), part.slots[n]) for n in rows])
        else:
            o, state = self._read(q, k, v, self._found(part.slots), part.cu)
            self._keep(part.targets, state)
        part.keep(*self.memory)
        return o

    def step(self, q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
        """Returns the outputs of single tokens."""
        state = self._found(slots)
        o = self._step(q[:, None], k[:, None], v[:, None], state)
        self._keep(slots, state)
        return o[:, 0]

    @abstractmethod
    def _read(self, q: Tensor, k: Tensor, v: Tensor, state: Any, cu: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the outputs of sequences, and their sums after them."""

    @abstractmethod
    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
        """Returns the outputs of single tokens (B, 1, H, D), and changes the sums in place."""

    def _found(self, slots: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.index_select(0, slots) for x in self.memory)

    def _keep(self, slots: Tensor, state: tuple[Tensor, ...]) -> None:
        for kept, x in zip(self.memory, state, strict=True):
            kept.index_copy_(0, slots, x)


class LinearSums(Sums):
    """The sums of linear attention."""

    def __init__(self, memory: tuple[Tensor, ...], sizes: LinearSizes, *, deterministic: bool) -> None:
        super().__init__(memory, deterministic=deterministic)
        self.options: dict[str, Any] = {"feature": sizes.feature, "normalise": sizes.normalise}

    def _read(self, q: Tensor, k: Tensor, v: Tensor, state: Any, cu: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return approximate.linear_with_state(q, k, v, CAUSAL, cu=cu, state=state, **self.options)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
        return approximate.linear_step(q, k, v, state, **self.options)


class PerformerSums(Sums):
    """The sums of Performer's features, and the largest exponents (rows, Hk)."""

    def __init__(self, memory: tuple[Tensor, ...], layer: PerformerLayer, scale: float, *, deterministic: bool) -> None:
        super().__init__(memory, deterministic=deterministic)
        self.options: dict[str, Any] = {"features": layer.features, "scale": scale}

    def _read(self, q: Tensor, k: Tensor, v: Tensor, state: Any, cu: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return approximate.performer_with_state(q, k, v, CAUSAL, cu=cu, state=state, **self.options)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, state: Any) -> Tensor:
        return approximate.performer_step(q, k, v, state, **self.options)

    def _found(self, slots: Tensor) -> tuple[Tensor, ...]:
        S, z, largest = super()._found(slots)
        # a fresh state is zero, and the largest of no exponents is -inf; after a key z has a number of at least 1
        return S, z, largest.masked_fill((z == 0).all(-1), -math.inf)


class LinearStep:
    """Mixes the tokens of a step; for all layers of a kind.

    Args:
        sums: by the layer's number.
        step: where the tokens are.
    """

    def __init__(self, sums: dict[int, Sums], step: StepTokens) -> None:
        self.sums, self.split = sums, step.split
        self.single = step.slots[step.split :]
        self.rounds = step.rounds()

    def __call__(self, layer: int, /, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        """Mixes the tokens of one layer; see `rooftile.models.Attend`."""
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        one, split, found = self.sums[layer], self.split, []
        if self.rounds is not None:
            found.append(self.rounds.run(one.read, q[:split], k[:split], v[:split]))
        if split < len(q):
            found.append(one.step(q[split:], k[split:], v[split:], self.single))
        return found[0] if len(found) == 1 else torch.cat(found)


class SumsMixer(StateMixer):
    """Layers whose state is sums over keys, of one kind."""

    kernels: ClassVar[tuple[str, ...]] = ("recurrent.linear.kernels",)

    def __init__(self, shape: ModelConfig, layers: tuple[int, ...], config: EngineConfig) -> None:
        super().__init__(shape, layers, config)
        # tokens one by one would be a graph of many small kernels
        self.captures = not config.deterministic
        if config.state_dtype != "fp32":
            raise Unsupported(
                f'state_dtype is "{config.state_dtype}" and the model has {self.name} layers; their sums grow with the text, and '
                "rounded they would no longer take in a token: leave state_dtype out"
            )

    @property
    @abstractmethod
    def features(self) -> int:
        """The number of features of a key."""

    @abstractmethod
    def sums(self, layer: Layer, memory: tuple[Tensor, ...]) -> Sums:
        """Returns the sums of a layer with their memory."""

    def specs(self) -> tuple[CacheSpec, ...]:
        heads = self.shape.kv_heads
        return (
            State(self.layers, f"{self.name} sums", (heads, self.features, self.shape.head_dim)),
            State(self.layers, f"{self.name} weights", (heads, self.features)),
        )

    def working_bytes(self, largest: Largest) -> int:
        """Returns the bytes of rotated queries and keys, their features and outputs, and of sums before and after a step."""
        heads = self.shape.heads + self.shape.kv_heads
        written = largest.tokens * heads * (2 * self.shape.head_dim * largest.computed.itemsize + self.features * 4)
        kept = sum(spec.sequence_bytes() for spec in self.specs()) // len(self.layers)
        return written + 2 * largest.answers * kept

    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        assert caches.states is not None
        memory = [caches.states.memory[spec.name] for spec in self.specs() if isinstance(spec, State)]
        self.by_layer = {
            layer: self.sums(decoder.layers[layer], tuple(x[place] for x in memory)) for place, layer in enumerate(self.layers)
        }

    def on(self, step: StepTokens) -> Attend:
        return LinearStep(self.by_layer, step)


class LinearMixer(SumsMixer):
    """Layers with linear attention."""

    name = "linear"

    @property
    def features(self) -> int:
        return self.shape.head_dim

    def sums(self, layer: Layer, memory: tuple[Tensor, ...]) -> Sums:
        return LinearSums(memory, cast(LinearSizes, self.shape.linear), deterministic=self.config.deterministic)


class PerformerMixer(SumsMixer):
    """Layers with Performer's attention."""

    name = "performer"

    @property
    def features(self) -> int:
        return cast(PerformerSizes, self.shape.performer).m

    def specs(self) -> tuple[CacheSpec, ...]:
        return *super().specs(), State(self.layers, "performer exponents", (self.shape.kv_heads,))

    def sums(self, layer: Layer, memory: tuple[Tensor, ...]) -> Sums:
        return PerformerSums(memory, cast(PerformerLayer, layer), self.shape.scale, deterministic=self.config.deterministic)
