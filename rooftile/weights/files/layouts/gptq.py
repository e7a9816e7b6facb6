"""GPTQ: codes (K / 8, N) along the first axis, zero points (K / group, N / 8), scales (K / group, N).

Version 1 stores zero points less one. Symmetric weights have the zero point 8 everywhere, so a folder that says version 1 and
stores 8 is version 2.

Version 1 has no code for a zero point of 0. GPTQModel subtracts one from all points of a word at once, so that 0 borrows from the
next point, and adding one to all of them gives each back. AutoGPTQ stores -1, whose ones cover all points above it in the word:
those are lost. In the last place of a word there is nothing to borrow from or to cover.

Frantar et al., GPTQ, arXiv:2210.17323.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.methods import FROM_16_BITS
from rooftile.weights.files.tensors import (
    check_dtype,
    check_expression,
    check_shape,
    checked_scales,
    group_of,
    int4_weight,
    order_of,
    packed_codes,
    refused,
    signed_codes,
    w8_weight,
    whole,
)
from rooftile.weights.packing import unpack_words, words_to_bytes


@dataclass(frozen=True, slots=True)
class Gptq:
    """The configuration of a GPTQ folder."""

    bits: int
    group: int
    sym: bool
    version: int
    in_another_order: bool  # columns were quantised in the order of their activations
    folder: str
    stays: tuple[str, ...] = ()  # regular expressions of modules that are not quantised
    borrows: bool = False  # whether GPTQModel has written it
    mislabelled: list[str] = field(default_factory=list, compare=False)  # modules of version 2 in a folder of version 1

    def check(self, modules: Collection[str]) -> None:
        """All projections are quantised, but for the ones that stay."""

    def formats(self) -> Collection[str]:
        """Returns the format for its bits."""
        return ("int4",) if self.bits == 4 else ("w8",)

    def covers(self, module: str) -> bool:
        """The head stays, and so do modules that the configuration leaves out."""
        return module != "lm_head" and not any(re.match(pattern, f"model.{module}") for pattern in self.stays)

    def suffixes(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Groups of columns may be left out where columns are in order."""
        codes, groups = ("qweight", "qzeros", "scales"), ("g_idx",)
        return ((*codes, *groups), ()) if self.in_another_order else (codes, groups)

    def read(self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantisedWeight:
        """The weight (N, K)."""
        N, K = shape
        group = whole(module, self.group, K)
        packed = 32 // self.bits
        for name, due in (("qweight", (-(-K // packed), N)), ("qzeros", (K // group, -(-N // packed)))):
            check_dtype(module, name, tensors[name], torch.int32)
            check_shape(module, name, tensors[name], due)
        scales = checked_scales(module, "scales", tensors["scales"], (K // group, N)).T
        zeros = self._zeros(module, tensors["qzeros"], N).T
        order = order_of(module, "g_idx", tensors["g_idx"], K, group) if "g_idx" in tensors else None
        if self.bits == 4:
            return int4_weight(packed_codes(tensors["qweight"].T, K), scales, zeros, order, group, shape)
        if not (zeros == 128).all():
            raise InvalidInput(f"{module}.qzeros has zero points for 8 bits; 8 bits are read without: quantise it with sym=True")
        return w8_weight(signed_codes(tensors["qweight"].T, K), scales, order, group)

    def _zeros(self, module: str, words: Tensor, N: int) -> Tensor:
        """Zero points (K / group, N) in the codes' numbers."""
        stored = _unpacked(words, self.bits)[:, :N].to(torch.int16)
        if self.version == 2:
            return stored
        if self.sym and (stored == 1 << (self.bits - 1)).all():
            if not self.mislabelled:
                logging.getLogger(__name__).warning(
                    "%s: quantization_config says GPTQ version 1, and %s.qzeros belong to version 2; all that are like it are "
                    "read so",
                    self.folder,
                    module,
                )
            self.mislabelled.append(module)
            return stored
        ones = _unpacked(words, self.bits) == (1 << self.bits) - 1
        if not self.borrows and ones.unflatten(-1, (-1, 32 // self.bits))[..., :-1].any():
            raise InvalidInput(
                f"{module}.qzeros has zero points of 0, which GPTQ version 1 has no code for and AutoGPTQ writes over others: "
                f"quantise it again as gptq_v2 or with sym=True, or {FROM_16_BITS}"
            )
        one = sum(1 << shift for shift in range(0, 32, self.bits))
        return _unpacked(words + one, self.bits)[:, :N].to(torch.int16)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unsigned codes (..., n * 32 / bits) of words (..., n)."""
    return unpack_words(words) if bits == 4 else words_to_bytes(words)


def reader_of(section: Mapping[str, Any], folder: str) -> Gptq:
    """Returns the reader of a GPTQ folder.

    Raises:
        InvalidInput: its configuration asks for what is not read.
    """
    bits, layout = section.get("bits"), str(section.get("checkpoint_format") or section.get("format") or "gptq")
    if bits not in (4, 8):
        raise refused(folder, f"has GPTQ of {bits} bits; read are 4 and 8: quantise it to one of these, or {FROM_16_BITS}")
    if layout not in ("gptq", "gptq_v2"):
        raise refused(
            folder, f"has the layout {layout!r}; read are gptq and gptq_v2: save it in one of these with GPTQModel, or "
            f"{FROM_16_BITS}"
        )  # fmt: skip
    version = 2 if layout == "gptq_v2" else 1
    stays = tuple(_left_out(section.get("dynamic") or {}, folder))
    is_symmetric, in_another_order = bool(section.get("sym", True)), bool(section.get("desc_act"))
    meta = section.get("meta")
    borrows = isinstance(meta, Mapping) and "gptqmodel" in str(meta.get("quantizer")).lower()
    return Gptq(bits, group_of(section, folder), is_symmetric, version, in_another_order, folder, stays, borrows)


def _left_out(rules: Mapping[str, Any], folder: str) -> Iterator[str]:
    """Yields the patterns of GPTQModel's `dynamic` whose modules are not quantised; rules of other kinds are refused."""
    if not isinstance(rules, Mapping):
        raise refused(folder, f"has dynamic {rules!r}; must be {{pattern: settings}}: correct it in config.json")
    for pattern, settings in rules.items():
        if not pattern.startswith("-:"):
            raise refused(folder, f"has the rule {pattern!r} with settings {settings} of its own; read are rules that leave "
                          'modules out ("-:"): quantise all others alike')  # fmt: skip
        check_expression(pattern[2:], pattern, "dynamic", folder)
        yield pattern[2:]
