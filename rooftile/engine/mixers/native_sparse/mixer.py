"""Native Sparse Attention in an engine.

Each branch has keys and values of its own. A block holds the keys and values of the selected branch. The near branch's, and keys
that are not compressed yet, lie in rows that are given back behind their window (`rooftile.kvcache.WindowPool`). A
compressed key is kept with the block that has its last token, in the plane COMPRESSED: forks, prefixes and preemption need
nothing new. Single tokens are read together, by `approximate.native_sparse.decoding`; `step` reads prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from rooftile.engine.mixers.exact.mixer import gathered_bytes
from rooftile.engine.mixers.mixer import Largest, Mixer
from rooftile.engine.mixers.native_sparse.step import SparseAttention, reads_in_place, specs_of
from rooftile.engine.mixers.native_sparse.trials import SparseLayer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.mixers.trial import ROWS, SHORT, USUAL, TrialSetup
from rooftile.engine.settings.config import EngineConfig
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.spec import CallSettings
from rooftile.kvcache.caches import Caches
from rooftile.kvcache.specs import CacheSpec
from rooftile.models import Attend, Decoder, ModelConfig


class NativeSparseMixer(Mixer):
    """Layers with Native Sparse Attention."""

    kernels: ClassVar[tuple[str, ...]] = (
        "approximate.native_sparse.selected.kernels.block_choice", "approximate.native_sparse.selected.kernels.gated_sum",
        "approximate.native_sparse.decoding_kernels", "exact.backends.triton.flash_fwd", "kvcache.page_kernels",
    )  # fmt: skip

    def __init__(self, shape: ModelConfig, layers: tuple[int, ...], config: EngineConfig) -> None:
        super().__init__(shape, layers, config)
        assert shape.native_sparse is not None
        self.sizes = shape.native_sparse
        self._check()

    def _check(self) -> None:
        """Refuses settings that do not go with layers of Native Sparse Attention."""
        what, config = "the model has native_sparse layers", self.config
        if config.deterministic:
            raise Unsupported(f"deterministic is True and {what}; their bits depend on what a step reads together")
        if config.kv_dtype == "fp8":
            raise Unsupported(f'kv_dtype is "fp8" and {what}; these have caches in the dtype of the model')
        if config.approximate is not None:
            raise Unsupported(
                f"approximate is given and {what}, which choose keys by themselves; Loki has attention in all layers"
            )  # fmt: skip
        if config.block_size % self.sizes.stride:
            raise InvalidInput(
                f"block_size is {config.block_size} and {what} with a stride of {self.sizes.stride}; must be a multiple of that"
            )

    def specs(self) -> tuple[CacheSpec, ...]:
        return specs_of(self.shape, self.layers, self.config.block_size)

    def working_bytes(self, largest: Largest) -> int:
        """Returns the bytes that one of its layers takes in a step.

        A prompt that kernels read in place takes a copy of its compressed keys and values, sorted lists of the blocks that a
        step's tokens chose, the outputs of two branches beside the near one, and queries and outputs of the compressed branch in
        an order of its own. Another prompt is read from a copy of all its keys and values. In decoding a head has two sums per
        block, and about ten parts of its outputs.
        """
        shape, tokens = self.shape, largest.length
        line = shape.head_dim * largest.computed.itemsize
        copied = 4 * tokens * shape.kv_heads * line
        if reads_in_place(shape, largest.computed, largest.device):
            # int32 and int64 numbers of each entry: the sorted blocks, their order, bits, words, and masks
            listed = 64 * largest.tokens * shape.kv_heads * self.sizes.count
            copied = 2 * (tokens // self.sizes.stride) * shape.kv_heads * line + listed
            copied += 4 * largest.tokens * shape.heads * line
        decoding = 4 * largest.answers * shape.heads * (2 * -(-tokens // self.sizes.block_size) + 10 * shape.head_dim)
        gathered = gathered_bytes(2 * shape.kv_heads * shape.head_dim, self.config.block_size, largest)
        return gathered + copied + decoding

    def begin(self, decoder: Decoder, caches: Caches, settings: CallSettings) -> None:
        self.attention = SparseAttention(decoder, caches)

    def on(self, step: StepTokens) -> Attend:
        return self.attention.on(step)

    @classmethod
    def trials(cls, trial: TrialSetup) -> Sequence[Callable[[], None]]:
        if trial.deterministic:
            return ()
        layer = SparseLayer(trial)
        # prompts of all lengths have most of their kernels in common
        return [partial(layer.read_prompts, (trial.longest, USUAL, SHORT)), partial(layer.decode, ROWS)]
