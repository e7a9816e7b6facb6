"""AWQ, its "gemm" layout: codes (K, N / 8), whose words hold eight outputs in the order 0 2 4 6 1 3 5 7.

Lin et al., AWQ, arXiv:2306.00978.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.weights import QuantisedWeight
from rooftile.weights.files.methods import FROM_16_BITS
from rooftile.weights.files.tensors import (
    check_dtype,
    check_shape,
    checked_scales,
    group_of,
    int4_weight,
    names_in,
    refused,
    whole,
)
from rooftile.weights.packing import pack, unpack_words

# the output at each place of a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """The configuration of an AWQ folder."""

    group: int
    ignored: tuple[str, ...]

    def check(self, modules: Collection[str]) -> None:
        """Every name in the list of modules that stay may be absent from the model."""

    def formats(self) -> Collection[str]:
        """Returns its one format."""
        return ("int4",)

    def covers(self, module: str) -> bool:
        """A name in the list means every module that it is a part of."""
        return module != "lm_head" and not any(name in f"model.{module}" for name in self.ignored)

    def suffixes(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Zero points are always stored."""
        return ("qweight", "qzeros", "scales"), ()

    def read(self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantisedWeight:
        """The weight (N, K)."""
        N, K = shape
        group = whole(module, self.group, K)
        for name, due in (("qweight", (K, -(-N // 8))), ("qzeros", (K // group, -(-N // 8)))):
            check_dtype(module, name, tensors[name], torch.int32)
            check_shape(module, name, tensors[name], due)
        scales = checked_scales(module, "scales", tensors["scales"], (K // group, N)).T
        codes, zeros = (unpacked(tensors[name])[:, :N].T for name in ("qweight", "qzeros"))
        return int4_weight(pack(codes), scales, zeros, None, group, shape)


def unpacked(words: Tensor) -> Tensor:
    """Unsigned codes (rows, 8 n) of words (rows, n), in the order of outputs."""
    places = torch.tensor(ORDER).argsort()
    return unpack_words(words).unflatten(-1, (-1, 8))[..., places].flatten(-2)


def reader_of(section: Mapping[str, Any], folder: str) -> Awq:
    """Returns the reader of an AWQ folder.

    Raises:
        InvalidInput: its configuration asks for what is not read.
    """
    bits = section.get("bits", 4)
    version = str(section.get("checkpoint_format") or section.get("version") or section.get("format") or "gemm").lower()
    if bits != 4:
        raise refused(folder, f"has AWQ of {bits} bits; read are 4: {FROM_16_BITS}")
    if version != "gemm":
        raise refused(
            folder, f'has the layout {version!r} of AWQ; read is "gemm": quantise it with version="gemm", or {FROM_16_BITS}'
        )  # fmt: skip
    return Awq(group_of(section, folder), names_in(section, ("modules_to_not_convert",), folder))
