"""The attention of a decoder's layers to an engine's cache.

    layout    what a block holds: the cache's layers, and what approximate methods keep beside them
    step      where the tokens of a step lie in the cache
    exact     exact attention
    loki      Loki in the steps that decode
"""

from __future__ import annotations

from rooftile.approximate import LokiLayers
from rooftile.kvcache import Pages
from rooftile.masks import CAUSAL, Mask, Window
from rooftile.models import Attend, ModelConfig
from rooftile.serve.attention.exact import Exact
from rooftile.serve.attention.loki import LokiAttention
from rooftile.serve.attention.step import Step
from rooftile.spec import Asked

__all__ = ["CacheAttention", "Step", "masks_of"]


def masks_of(config: ModelConfig) -> tuple[Mask, ...]:
    """Returns the mask of each layer."""
    return tuple(CAUSAL if w is None else CAUSAL & Window(w - 1) for w in config.windows)


class CacheAttention:
    """Computes the attention of all layers in a step.

    Args:
        config: the model's.
        pages: the cache.
        asked: scale, softcap and the like.
        loki: the rotations of the layers, for approximate decoding.
    """

    def __init__(self, config: ModelConfig, pages: Pages, asked: Asked, loki: LokiLayers | None = None) -> None:
        self.pages = pages
        self.masks = masks_of(config)
        self.asked = asked
        self._loki = None if loki is None else LokiAttention(loki, pages, asked)

    @property
    def splits_prompts(self) -> bool:
        """Whether a prompt's tokens are computed otherwise than those of an answer, whatever a step reads together."""
        return self._loki is not None

    @property
    def captures(self) -> bool:
        """Whether steps that only decode can be captured in graphs: whether no size in them depends on their lengths."""
        return self._loki is None

    def on(self, step: Step) -> Attend:
        """Returns what computes attention in one step."""
        if self._loki is None:
            return Exact(self.pages, self.masks, self.asked, step)
        return self._loki.on(step, self.masks)
