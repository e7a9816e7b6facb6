"""`Step`: where the tokens of a step lie in the cache, as the attention of every layer needs it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rooftile.serve.step_inputs import Chunks


class Step(NamedTuple):
    """The tokens of a step: chunks of prompts first, then single tokens."""

    cells: Tensor  # (total,) each token's slot in the cache; -1 for padding
    chunks: Chunks | None
    single: tuple[Tensor, Tensor] | None  # block tables (B, N) and lengths (B,) of the single tokens

    @property
    def split(self) -> int:
        """How many tokens the chunks have."""
        return 0 if self.chunks is None else self.chunks.tokens
