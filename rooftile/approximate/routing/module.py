"""The Routing Transformer's attention as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile import approximate
from rooftile.approximate.chosen_arguments import check_fraction, check_mask, check_seed
from rooftile.errors import InvalidInput
from rooftile.exact.masks import FULL, Mask
from rooftile.exact.projections import Projections
from rooftile.runtime.arguments import check_count, check_flag
from rooftile.runtime.words import answers_foreign_words


class Routing(Projections):
    """Routing attention with its projections and centroids: (B, T, dim) in, (B, T, dim) out.

    Args:
        dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype: as in `Attention`.
        clusters: centroids per head.
        mask: FULL or CAUSAL. None is FULL.
        decay: of the centroids, which follow their members in training; 1 keeps them as they are.
        commitment: weight of the loss that keeps tokens near their centroids.
        seed: of the first centroids.
        backend, strict, width: as in `rooftile.approximate.routing`.

    The centroids are a buffer in fp32: they are saved with the parameters and have no gradient. In training a call moves them,
    and leaves the commitment loss in `layer.loss`, to be added to the loss of the model.

    Raises:
        InvalidInput: sizes do not match, or there is no such mask or option.

    Example:
        >>> layer = Routing(512, heads=8, mask=rooftile.CAUSAL, clusters=4)
        >>> layer(torch.randn(2, 100, 512)).shape
        torch.Size([2, 100, 512])

    Roy et al., arXiv:2003.05997.
    """

    centroids: Tensor

    @answers_foreign_words
    def __init__(
        self, dim: int, heads: int, *, backend: str | None = None, bias: bool = True, clusters: int = 16,
        commitment: float = 1e-4, context_dim: int | None = None, decay: float = 0.999, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, head_dim: int | None = None, kv_heads: int | None = None, mask: Mask | None = FULL,
        seed: int = 0, strict: bool = False, width: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, heads, kv_heads, head_dim, bias, context_dim, device, dtype)
        check_mask("routing", mask)
        self.mask, self.strict = FULL if mask is None else mask, check_flag("strict", strict)
        if self.strict and width is not None:
            raise InvalidInput(f"width is {width} with strict; every token goes to one cluster: leave it out")
        self.width = None if width is None else check_count("width", width)
        self.decay, self.commitment, self.backend = check_fraction("decay", decay), commitment, backend
        generator = torch.Generator().manual_seed(check_seed(seed))
        drawn = torch.randn(heads, check_count("clusters", clusters), self.head_dim, generator=generator)
        self.register_buffer("centroids", drawn.to(device))
        self.loss: Tensor | None = None

    @answers_foreign_words
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Computes routing attention of x (B, T, dim) to itself, or to a context (B, S, context_dim) if one is given."""
        q, k, v = self.project(x, context)
        o, members = approximate.routing(
            q, k, v, self.centroids, self.mask, backend=self.backend, strict=self.strict, width=self.width
        )
        if self.training:
            # the loss of the centroids before they move
            self.loss = approximate.commitment_loss(q, k, self.centroids.clone(), commitment=self.commitment)
            if self.decay < 1:
                self.centroids.copy_(approximate.update_centroids(self.centroids, q, k, members, decay=self.decay))
        return self.out(o.flatten(-2))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mask={self.mask}, clusters={self.centroids.shape[1]}" + ", strict" * self.strict
