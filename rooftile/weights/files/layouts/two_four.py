"""2:4 weights as `rooftile.qat.save(layout="two_four")` stores them: values and places, and scales of FP8 and INT8."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.weights.files.tensors import check_dtype, check_shape, checked_scales, refused
from rooftile.weights.files.two_four import LAYOUT, PLACES, SCALES, VALUES
from rooftile.weights.two_four import TwoFour


@dataclass(frozen=True, slots=True)
class TwoFourReader:
    """The configuration of a folder: which modules are 2:4."""

    modules: frozenset[str]

    def check(self, modules: Collection[str]) -> None:
        """The list may have a module that is not there: its tensors are then left over, which is refused later."""

    def formats(self) -> Collection[str]:
        """Returns none: 2:4 weights have other products."""
        return ()

    def covers(self, module: str) -> bool:
        """Whether the list has a module."""
        return module in self.modules or f"model.{module}" in self.modules

    def suffixes(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """FP8 and INT8 have scales."""
        return (VALUES, PLACES), (SCALES,)

    def read(self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> TwoFour:
        """The weight (N, K)."""
        N, K = shape
        values, places = tensors[VALUES], tensors[PLACES]
        check_shape(module, VALUES, values, (N, K // 2))
        check_shape(module, PLACES, places, (N, -(-K // 8)))
        check_dtype(module, PLACES, places, torch.uint8)
        _check_order(module, places, K)
        scales = tensors.get(SCALES)
        scales = None if scales is None else checked_scales(module, SCALES, scales, (N, 1)).float()
        return TwoFour(values, places, shape, scales)


def _check_order(module: str, places: Tensor, K: int) -> None:
    four = torch.stack((places & 15, places >> 4), -1).flatten(1)[:, : K // 4]
    if ((four & 3) >= four >> 2).any():
        raise InvalidInput(f"{module}.{PLACES} has two places in a wrong order; the first must be lower: download the file again")


def reader_of(section: Mapping[str, Any], folder: str) -> TwoFourReader:
    """Returns the reader of a folder.

    Raises:
        InvalidInput: its configuration is another one.
    """
    modules = section.get("modules")
    if section.get("format") != LAYOUT or not isinstance(modules, list):
        raise refused(folder, f"has the format {section.get('format')!r}; read is {LAYOUT!r}, with a list of modules")
    return TwoFourReader(frozenset(str(name) for name in modules))
