"""FP8 as Transformers, vLLM and ModelOpt store it: e4m3, with a scale per tile of 128 x 128 or one for all.

One scale for all has two names where `quant_method` is "fp8": Transformers writes `weight_scale_inv` and `activation_scale`, vLLM
reads `weight_scale` and `input_scale`. Codes are multiplied by either.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.methods import FROM_16_BITS
from rooftile.weights.files.tensors import checked_codes, checked_scales, names_in, refused
from rooftile.weights.formats import TILE, full_names

# Transformers' names -> the others'
_NAMES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}


@dataclass(frozen=True, slots=True)
class Fp8:
    """The configuration of a folder in FP8."""

    tiles: bool
    static: bool
    ignored: tuple[str, ...]

    def check(self, modules: Collection[str]) -> None:
        """Every name in the list of modules that stay may be absent from the model."""

    def formats(self) -> Collection[str]:
        """Returns FP8 with scales for rows or for tiles."""
        return ("fp8_tile",) if self.tiles else ("fp8",)

    def covers(self, module: str) -> bool:
        """A name in the list means a module, or all modules inside of it."""
        return module != "lm_head" and not any(_is_in(module, name) for name in self.ignored)

    def suffixes(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Activations have a scale in the file, or find one at run time."""
        if self.tiles:
            return ("weight", "weight_scale_inv"), ()
        return ("weight",), (*_NAMES, *_NAMES.values())

    def read(self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantisedWeight:
        """The weight (N, K)."""
        N, K = shape
        codes = checked_codes(module, "weight", tensors["weight"], shape, torch.float8_e4m3fn)
        if self.tiles:
            due = (-(-N // TILE), -(-K // TILE))
            scales = tensors["weight_scale_inv"]
            scales = checked_scales(module, "weight_scale_inv", scales, due).float()
            return QuantisedWeight(codes, scales, None, None, "fp8_tile", TILE, shape)
        tensors = {_NAMES.get(name, name): x for name, x in tensors.items()}
        for name in ("weight_scale", *(["input_scale"] * self.static)):
            if name not in tensors:
                raise InvalidInput(
                    f"the checkpoint lacks {module}.{name}, which its quantization_config asks for; download it again"
                )
        scales = checked_scales(module, "weight_scale", tensors["weight_scale"], (N, 1)).float()
        given = input_scale_of(module, tensors, self.static)
        return QuantisedWeight(codes, scales, None, None, "fp8", K, shape, None, given)


def _is_in(module: str, name: str) -> bool:
    """Whether a name, which may end with *, means a module or one that it lies in."""
    for full in full_names(module):
        if full == name or full.startswith(f"{name}.") or full.endswith(f".{name}"):
            return True
        if name.endswith("*") and full.startswith(name[:-1]):
            return True
    return False


def input_scale_of(module: str, tensors: Mapping[str, Tensor], static: bool) -> Tensor | None:
    """Returns the scale of all activations, if the file has one that counts."""
    if not static:
        return None
    if tensors["input_scale"].numel() != 1:
        raise InvalidInput(f"{module}.input_scale has {tensors['input_scale'].numel()} numbers; must have one")
    return checked_scales(module, "input_scale", tensors["input_scale"], (1,)).float()


def reader_of(section: Mapping[str, Any], folder: str) -> Fp8:
    """Returns the reader of a folder of Transformers' FP8.

    Raises:
        InvalidInput: its configuration asks for what is not read.
    """
    tile, scheme = section.get("weight_block_size"), section.get("activation_scheme", "dynamic")
    if tile is not None and list(tile) != [TILE, TILE]:
        raise refused(folder, f"has weight_block_size {tile}; read are [{TILE}, {TILE}] and none: {FROM_16_BITS}")
    if scheme not in ("dynamic", "static") or (scheme == "static" and tile is not None):
        raise refused(folder, f"has activation_scheme {scheme!r}; read are dynamic, and without tiles static: {FROM_16_BITS}")
    if (scales := section.get("scale_fmt")) not in (None, "float"):
        logging.getLogger(__name__).warning(
            "%s: scale_fmt %r is not used: scales of activations are not rounded to powers of two", folder, scales
        )
    ignored = names_in(section, ("modules_to_not_convert", "ignored_layers"), folder)
    return Fp8(tile is not None, scheme == "static", ignored)


def reader_of_modelopt(section: Mapping[str, Any], folder: str) -> Fp8:
    """Returns the reader of a folder of ModelOpt in FP8: one scale per weight, and one for its activations.

    Raises:
        InvalidInput: its configuration asks for what is not read.
    """
    algorithm = section.get("quant_algo")
    if algorithm != "FP8":
        raise refused(folder, f"has quant_algo {algorithm!r}; read is FP8: {FROM_16_BITS}")
    return Fp8(False, True, names_in(section, ("ignore", "exclude_modules"), folder))
