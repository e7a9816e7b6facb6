"""The attention of a decoder's layers to an engine's cache.

layout          what a block holds: the cache's layers, and what approximate methods keep beside them
step            where the tokens of a step lie in the cache
exact           exact attention
loki            Loki in the steps that decode
native_sparse   Native Sparse Attention
"""

from __future__ import annotations

from torch import Tensor

from rooftile.approximate import LokiLayers
from rooftile.engine.attention.exact import Exact
from rooftile.engine.attention.loki import LokiAttention
from rooftile.engine.attention.native_sparse import SparseAttention
from rooftile.engine.attention.step import Step
from rooftile.exact.masks import CAUSAL, Mask, Window
from rooftile.exact.spec import Asked
from rooftile.kvcache import Pages, Rotation
from rooftile.models import Attend, Decoder, ModelConfig
from rooftile.runtime.devices import runs_kernels

__all__ = ["CacheAttention", "Step", "masks_of"]


def masks_of(config: ModelConfig) -> tuple[Mask, ...]:
    """Returns the mask of each layer."""
    return tuple(CAUSAL if w is None else CAUSAL & Window(w - 1) for w in config.windows)


class CacheAttention:
    """Computes the attention of all layers in a step.

    Args:
        decoder: the model.
        pages: the cache, with the planes of its `CacheLayout`.
        asked: scale, softcap and the like.
        loki: the rotations of the layers, for approximate decoding.
    """

    def __init__(self, decoder: Decoder, pages: Pages, asked: Asked, loki: LokiLayers | None = None) -> None:
        self.pages, self.asked = pages, asked
        self.masks, self.mixers = masks_of(decoder.config), decoder.config.mixers
        self._loki = None if loki is None else LokiAttention(loki, pages, asked)
        self._sparse = SparseAttention(decoder, pages) if "native_sparse" in self.mixers else None

    @property
    def splits_prompts(self) -> bool:
        """Whether a prompt's tokens are computed otherwise than those of an answer, whatever a step reads together."""
        return self._loki is not None

    @property
    def captures(self) -> bool:
        """Whether steps that only decode can be captured in graphs: whether no size in them depends on their lengths."""
        return (self._sparse is None and self._loki is None) or runs_kernels(self.pages.storage)

    def on(self, step: Step) -> Attend:
        """Returns what computes attention in one step."""
        if self._loki is not None:
            return self._loki.on(step, self.masks)
        exact = Exact(self.pages, self.masks, self.asked, step)
        if self._sparse is None:
            return exact
        sparse = self._sparse.on(step)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, gates: Tensor | None = None
        ) -> Tensor:  # fmt: skip
            chosen = exact if self.mixers[layer] == "attention" else sparse
            return chosen(layer, q, k, v, rotation, gates)

        return attend
