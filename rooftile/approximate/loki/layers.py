"""`LokiLayers`: Loki for a whole model, one rotation per layer, in one file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.chosen_arguments import check_fraction
from rooftile.approximate.loki.attention import Loki, read_tensors, write_tensors
from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import shown
from rooftile.runtime.words import answers_foreign_words, answers_words

FORMAT = "rooftile loki layers 1"
# numbers of a model are rounded when its dtype changes, by at most 2**-8 in bf16
TOLERANCE = 2**-6


@answers_words
class LokiLayers:
    """Loki for each layer of a model: what `rooftile calibrate` makes, and `LLM(approximate=)` takes.

    Args:
        layers: one Loki per layer, all with as many heads of the same size, the same dims and keep, fitted to keys with their
            rotary positions.
        sample: some of the model's weights, by which `check_sample` knows the model again; None for any model.
        variances: the variance of the keys in each direction, largest first, (layers, Hk, D); None if it is not known.

    Raises:
        InvalidInput: the layers do not go together.

    Example:
        >>> layers = LokiLayers([Loki.fit(torch.randn(100, 2, 16)) for _ in range(4)])
        >>> layers
        LokiLayers(4 layers, 2 heads of 16, dims=0.25, keep=0.25)

    Singhania et al., Loki, arXiv:2406.02542.
    """

    def __init__(
        self, layers: Sequence[Loki], *, sample: Tensor | None = None, variances: Tensor | None = None
    ) -> None:  # fmt: skip
        self.layers = tuple(layers)
        self.sample, self.variances = sample, variances
        if not self.layers or not all(isinstance(loki, Loki) for loki in self.layers):
            raise InvalidInput(f"layers is {shown(layers)}; must be a list of one Loki per layer")
        first = self.layers[0]
        for n, loki in enumerate(self.layers):
            if loki.p.shape != first.p.shape or (loki.dims, loki.keep) != (first.dims, first.keep):
                raise InvalidInput(f"layer {n} has {loki}; layer 0 has {first}, and all layers must have the same sizes")
            if not loki.rotated:
                raise InvalidInput(
                    f"layer {n} was fitted to keys before their rotary turn; a cache has them after it, so rotated must be True"
                )

    @property
    def dims(self) -> float:
        """The share of the dimensions that choose."""
        return self.layers[0].dims

    @property
    def keep(self) -> float:
        """The share of the keys that are kept."""
        return self.layers[0].keep

    @property
    def leading(self) -> int:
        """The number of dimensions that choose."""
        return self.layers[0].leading

    @property
    def explained(self) -> list[float]:
        """The share of the keys' variance, per layer, that lies in the dimensions that choose; empty if it is not known."""
        if self.variances is None:
            return []
        shares = self.variances[..., : self.leading].sum((1, 2)) / self.variances.sum((1, 2)).clamp(min=1e-30)
        return [float(share) for share in shares]

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        heads, dim, _ = self.layers[0].p.shape
        return f"LokiLayers({len(self)} layers, {heads} heads of {dim}, dims={self.dims:g}, keep={self.keep:g})"

    @answers_foreign_words
    def replace(self, *, dims: float | None = None, keep: float | None = None) -> LokiLayers:
        """Returns the same rotations with another share of dimensions or keys: neither is a part of the fit."""
        dims = self.dims if dims is None else check_fraction("dims", dims)
        keep = self.keep if keep is None else check_fraction("keep", keep)
        lokis = [Loki(loki.p, dims, keep, loki.rotated, loki.model) for loki in self.layers]
        return LokiLayers(lokis, sample=self.sample, variances=self.variances)

    def check_sizes(self, layers: int, heads: int, dim: int) -> None:
        """Raises InvalidInput unless a model has these sizes: layers, key heads, and head dim."""
        its = (len(self), *self.layers[0].p.shape[:2])
        if its != (layers, heads, dim):
            raise InvalidInput(
                f"approximate has {its[0]} layers of {its[1]} key heads of {its[2]}; the model has {layers} of {heads} of {dim}: "
                "calibrate this model"
            )

    def check_sample(self, sample: Tensor) -> None:
        """Raises InvalidInput unless the model's weights are those that it was fitted to, but for rounding."""
        if self.sample is None:
            return
        due, found = self.sample.float().cpu(), sample.float().cpu()
        if due.shape != found.shape or bool(((due - found).abs() > TOLERANCE * due.abs().max()).any()):
            raise InvalidInput("approximate was fitted to another model, of the same sizes; calibrate this model")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes this to a file that `load` reads."""
        rotations = torch.stack([loki.p.cpu() for loki in self.layers])
        names = [loki.model for loki in self.layers]
        held = {"dims": self.dims, "keep": self.keep, "p": rotations, "names": names}
        write_tensors({"format": FORMAT, **held, "sample": self.sample, "variances": self.variances}, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LokiLayers:
        """Reads a file that `save` or `rooftile calibrate` wrote.

        Raises:
            InvalidInput: it cannot be read, or holds something else.
        """
        held = read_tensors(path, "`rooftile calibrate`")
        if not isinstance(held, dict) or held.get("format") != FORMAT:
            raise InvalidInput(f"{path} is no file of `rooftile calibrate`, or one of another version; must be {FORMAT!r}")
        p: Any = held.get("p")
        sample, variances, names = held.get("sample"), held.get("variances"), held.get("names", [])
        whole = isinstance(p, Tensor) and p.ndim == 4 and p.shape[2] == p.shape[3] and bool(p.isfinite().all())
        whole = whole and isinstance(sample, Tensor | None) and isinstance(names, list) and len(names) == len(p)
        if not whole or not (variances is None or (isinstance(variances, Tensor) and variances.shape == p.shape[:3])):
            raise InvalidInput(f"{path} is damaged: its rotations must be finite and (layers, heads, D, D); calibrate again")
        dims, keep = check_fraction("dims", held.get("dims")), check_fraction("keep", held.get("keep"))
        lokis = [Loki(one.float(), dims, keep, True, str(name)) for one, name in zip(p, names, strict=True)]
        return LokiLayers(lokis, sample=sample, variances=variances)
