"""Random features of queries and keys: a projection drawn once, and the map that makes features of it.

Choromanski et al., Rethinking Attention with Performers, arXiv:2009.14794.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.arguments import check_scale
from rooftile.approximate.performer.definition import KINDS, phi
from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_choice, check_count, check_flag, shown, whole
from rooftile.runtime.words import answers_words

LENGTHS = ("gaussian", "sqrt")
# kinds that make two features of each row of the projection
IN_PAIRS = ("hyperbolic", "trigonometric")


@answers_words
class Features:
    """Random features whose products of queries and keys are, on average, the exponentials of their scores.

    Make them with `Features.draw`. The projection W is a tensor without a gradient; a call draws nothing.

    Attributes:
        projection: W, float32, (m, D), or (m / 2, D) for kinds that make two features of a row.
        kind: "positive", "hyperbolic", "trigonometric" or "relu".

    Example:
        >>> features = Features.draw(64, 256, seed=0)
        >>> features(torch.randn(10, 64)).shape
        torch.Size([10, 256])
    """

    def __init__(self, projection: Tensor, kind: str = "positive", *, orthogonal: bool = True, lengths: str = "gaussian") -> None:
        if not isinstance(projection, Tensor) or projection.ndim != 2 or not projection.is_floating_point():
            raise InvalidInput(f"projection is {shown(projection)}; must be a floating-point tensor (rows, D)")
        self.kind = check_choice("kind", kind, KINDS)
        self.orthogonal, self.lengths = check_flag("orthogonal", orthogonal), check_choice("lengths", lengths, LENGTHS)
        self.projection = projection.detach()

    @classmethod
    def draw(
        cls,
        dim: int,
        m: int = 256,
        *,
        device: torch.device | str | None = None,
        kind: str = "positive",
        lengths: str = "gaussian",
        orthogonal: bool = True,
        seed: int = 0,
    ) -> Features:
        """Draws a projection for heads of `dim` dimensions. The same seed draws the same on every device.

        Args:
            dim: D, of queries and keys.
            m: number of features, even for "hyperbolic" and "trigonometric".
            device: of the projection.
            kind: "positive": exp(w . x - |x|^2 / 2); "hyperbolic": the same for w and -w; "trigonometric": exp(|x|^2 / 2) times
                cos and sin of w . x; "relu": max(w . x, 0), whose products are no estimate of the softmax.
            lengths: of the rows: "gaussian" are the norms of independent Gaussian vectors, "sqrt" is sqrt(dim) for all.
            orthogonal: rows are orthogonal in blocks of dim; False draws them independently.
            seed: an int.

        Raises:
            InvalidInput: an argument is wrong; says what came and what is due.

        Example:
            >>> Features.draw(64, 256, kind="hyperbolic", seed=1).projection.shape
            torch.Size([128, 64])
        """
        dim, m = check_count("dim", dim), check_count("m", m)
        check_choice("kind", kind, KINDS)
        if kind in IN_PAIRS and m % 2:
            raise InvalidInput(f"m is {m}; must be even: {kind} makes two features of each row of its projection")
        rows = m // 2 if kind in IN_PAIRS else m
        made = cls(torch.empty(rows, dim, device=device), kind, orthogonal=orthogonal, lengths=lengths)
        return made.redraw(seed)

    @property
    def dim(self) -> int:
        """D, of the queries and keys."""
        return self.projection.shape[1]

    @property
    def m(self) -> int:
        """The number of features."""
        return self.projection.shape[0] * (2 if self.kind in IN_PAIRS else 1)

    def redraw(self, seed: int) -> Features:
        """Draws the projection anew, in place, and returns these features."""
        number = whole(seed)
        if number is None:
            raise InvalidInput(f"seed is {shown(seed)}; must be an int")
        generator = torch.Generator().manual_seed(number)
        rows, dim = self.projection.shape
        self.projection.copy_(_drawn(rows, dim, self.orthogonal, self.lengths, generator))
        return self

    def __call__(self, x: Tensor, *, scale: float | None = None) -> Tensor:
        """The features of x (..., D) as a tensor (..., m), in the dtype of x: for studies, as `performer` never stores them.

        features(q) . features(k) estimates exp(scale q . k), so x is multiplied by the root of the scale, 1 / sqrt(D) if
        None. Nothing is subtracted from the exponents, so long vectors overflow here, and not in `performer`.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1:] != (self.dim,):
            raise InvalidInput(f"x is {shown(x)}; must be a floating-point tensor (..., {self.dim}), as W is")
        root = check_positive_scale(scale, self.dim) ** 0.5
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return phi(x.to(wide) * root, self.projection.to(x.device, wide), self.kind).to(x.dtype)

    def __repr__(self) -> str:
        drawn = "orthogonal" if self.orthogonal else "independent"
        return f"Features(dim={self.dim}, m={self.m}, kind={self.kind!r}, {drawn}, lengths={self.lengths!r})"


def check_positive_scale(scale: Any, dim: int) -> float:
    """A scale that has a root: each of queries and keys takes one."""
    number = check_scale(scale, dim)
    if number <= 0:
        raise InvalidInput(f"scale is {number}; must be above 0: queries and keys are each multiplied by its root")
    return number


def _drawn(rows: int, dim: int, orthogonal: bool, lengths: str, generator: torch.Generator) -> Tensor:
    """A projection (rows, dim), computed in fp64."""
    gaussian = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
    norms = gaussian.norm(dim=1, keepdim=True)
    directions = gaussian / norms
    if orthogonal:
        blocks = []
        for _ in range(-(-rows // dim)):
            q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
            # LAPACK leaves signs that depend on the columns; with R's diagonal above zero every rotation is equally likely
            blocks.append((q * r.diagonal().sign()).T)
        directions = torch.cat(blocks)[:rows]
    return directions * (norms if lengths == "gaussian" else dim**0.5)
