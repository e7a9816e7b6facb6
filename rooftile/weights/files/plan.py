"""The argument `weights=`: which modules are quantised, and by whom: this library while it reads, or the checkpoint's maker."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.runtime.devices import capability
from rooftile.weights import QuantisedWeight
from rooftile.weights.dispatch import lack_of_fp8
from rooftile.weights.files.formats import SPARSE, check_word, weight_in
from rooftile.weights.files.layouts import awq, compressed_tensors, fp8, gptq, torchao, two_four
from rooftile.weights.files.methods import section_of
from rooftile.weights.formats import expression, matches, parsed
from rooftile.weights.two_four import TwoFour

Weights = str | Mapping[str, str]


class Reader(Protocol):
    """Turns the tensors of modules into quantised or 2:4 weights."""

    def check(self, modules: Collection[str]) -> None:
        """Raises InvalidInput if the configuration does not fit these modules."""

    def formats(self) -> Collection[str]:
        """The formats of its quantised weights, as far as its configuration says."""

    def covers(self, module: str) -> bool:
        """Whether a module is quantised; else its weight is a plain tensor."""

    def suffixes(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The last parts of the names of its tensors: those that must be there, and those that may."""

    def read(self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantisedWeight | TwoFour:
        """The weight (N, K); tensors by the last parts of their names."""


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Quantises or masks plain weights while they are read: {pattern: word}, of which the first that matches counts."""

    patterns: tuple[tuple[str, str], ...]

    def check(self, modules: Collection[str]) -> None:
        """Raises InvalidInput for a pattern that matches nothing."""
        for pattern, _ in self.patterns:
            if not any(matches(pattern, module) for module in modules):
                some = next(iter(modules), "none")
                raise InvalidInput(f"weights has the pattern {pattern!r}, which matches no module; modules are such as {some}")

    def formats(self) -> Collection[str]:
        """Returns the formats in its words."""
        return [parsed(word)[0] for _, word in self.patterns if word not in ("auto", SPARSE)]

    def word(self, module: str) -> str:
        """Returns the format of a module, "auto" if it stays."""
        return next((word for pattern, word in self.patterns if matches(pattern, module)), "auto")

    def covers(self, module: str) -> bool:
        """Whether a pattern gives it a format."""
        return self.word(module) != "auto"

    def suffixes(self, module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """A plain weight."""
        return ("weight",), ()

    def read(self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantisedWeight | TwoFour:
        """Quantises or masks the weight."""
        return weight_in(tensors["weight"], self.word(module), module)


def check_words(weights: object) -> None:
    """Checks the argument `weights=` itself.

    Raises:
        InvalidInput: it is no format, "auto" or dictionary of them.
    """
    words = [*weights.values()] if isinstance(weights, Mapping) else [weights]
    if isinstance(weights, Mapping) and (not weights or not all(isinstance(key, str) for key in weights)):
        raise InvalidInput(f'weights is {str(weights)[:60]}; must be {{pattern: format}}, such as {{"*.mlp.*": "int4"}}')
    for word in words:
        if word == "auto":
            continue
        if not isinstance(word, str):
            raise InvalidInput(f'weights is {word!r}; must be "auto", a format, or a dictionary {{pattern: format}}')
        check_word(word)
    for key in weights if isinstance(weights, Mapping) else ():
        if key.startswith("re:"):
            expression(key[3:], f"weights has the pattern {key!r}, which is")


def quantiser_of(weights: Weights) -> Quantiser | None:
    """Returns the quantiser that `weights=` asks for, None for "auto"."""
    check_words(weights)
    if isinstance(weights, Mapping):
        return Quantiser(tuple(weights.items()))
    return None if weights == "auto" else Quantiser((("*", weights),))


def check_device(reader: Reader | None, device: torch.device) -> None:
    """Checks that a device multiplies the weights that a reader reads.

    Raises:
        Unsupported: they are in FP8, and the GPU has no products in it.
    """
    if reader is None:
        return
    for format in reader.formats():
        if lack_of_fp8(format, device):
            major, minor = capability(device)
            raise Unsupported(
                f"weights in {format} need FP8 products, and {device} has compute capability {major}.{minor}; needs 8.9 (Ada): "
                'give the 16-bit checkpoint and weights="w8" or "int4", which multiply in 16 bits on every GPU'
            )


FAMILIES: dict[str, Callable[[Mapping[str, Any], str], Reader]] = {
    "compressed-tensors": compressed_tensors.reader_of,
    "gptq": gptq.reader_of,
    "awq": awq.reader_of,
    "fp8": fp8.reader_of,
    "modelopt": fp8.reader_of_modelopt,
    "torchao": torchao.reader_of,
    "rooftile": two_four.reader_of,
}


def plan_of(weights: Weights, folder: Path) -> Reader | None:
    """Returns the reader of the quantised weights of a folder; None where all tensors are plain, and stay so.

    Raises:
        InvalidInput: `weights` contradicts the checkpoint, or its configuration cannot be read.
    """
    asked = quantiser_of(weights)
    section = section_of(folder)
    if not section:
        return asked
    method = section["quant_method"]
    if asked is not None:
        raise InvalidInput(
            f"weights is {str(weights)[:60]!r} and the checkpoint {folder} is quantised already ({method}); leave weights "
            "out, or give the 16-bit checkpoint"
        )
    # gpt-oss's experts in MXFP4 are read by their names, and all else is plain
    return FAMILIES[method](section, str(folder)) if method in FAMILIES else Quantiser(())
