"""The formats of quantised weights: what a weight is stored in, which numbers share a scale, and how it is multiplied."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import index

import torch

from rooftile.errors import InvalidInput
from rooftile.runtime.words import format_answer

# int4 groups; K, a whole row, is one too
GROUPS = (32, 64, 128)
# ... for rows of any length
ROW = -1
# rows and columns of a tile that shares a scale
TILE = 128
# the longest row whose int8 products are exact in int32: 128 * 127 * K < 2^31
LONGEST_INT8 = 2**31 // (128 * 127)
_PREFIXES = ("model", "transformer", "model.language_model", "language_model.model", "language_model", "model.text_model")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of weights (N, K).

    Args:
        name: the word for it.
        codes: the dtype of its codes; two codes of 4 bits share a byte of uint8, the first of them in the low half.
        bits: per weight, without scales.
        group: neighbours of a row that share a scale; None for the whole row, or for what `quantise_weight` is told.
        activations: the format that x is quantised to, one of `numerics.ROW_FORMATS`; None where x stays in 16 bits.
    """

    name: str
    codes: torch.dtype
    bits: int
    group: int | None = None
    activations: str | None = None

    @property
    def is_packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits == 4

    @property
    def has_exponents(self) -> bool:
        """Whether scales are powers of two, stored as their exponents."""
        return self.name in ("mxfp8", "mxfp4")


_E4M3 = torch.float8_e4m3fn
WEIGHT_FORMATS = {
    each.name: each
    for each in (
        WeightFormat("fp8", _E4M3, 8, activations="fp8"),
        WeightFormat("fp8_tile", _E4M3, 8, group=TILE, activations="fp8_tile"),
        WeightFormat("int8", torch.int8, 8, activations="int8"),
        WeightFormat("w8", torch.int8, 8),
        WeightFormat("int4", torch.uint8, 4),
        WeightFormat("mxfp8", _E4M3, 8, group=32),
        WeightFormat("mxfp4", torch.uint8, 4, group=32),
        WeightFormat("nvfp4", torch.uint8, 4, group=16),
    )
}


def weight_format(name: object) -> WeightFormat:
    """Returns the format with this name.

    Raises:
        InvalidInput: there is none.
    """
    if not isinstance(name, str) or name not in WEIGHT_FORMATS:
        raise InvalidInput(f"format is {name!r}; must be one of {', '.join(WEIGHT_FORMATS)}{format_answer(name)}")
    return WEIGHT_FORMATS[name]


def group_of(format: WeightFormat, K: int, group: int | None) -> int:
    """Returns how many neighbours of a row share a scale, where `group` of them are asked for.

    Raises:
        InvalidInput: the format has no such group, or K is not a multiple of it.
    """
    if format.name == "int4":
        asked = TILE if group is None else K if group == ROW else group
        if not hasattr(asked, "__index__") or (asked != K and asked not in GROUPS):
            raise InvalidInput(f"group is {asked!r}; int4 has {', '.join(map(str, GROUPS))}, or K (here {K}) or -1, a whole row")
    else:
        asked = format.group or K
        if group not in (None, asked):
            raise InvalidInput(f"group is {group}; {format.name} has {asked}: leave it out")
    # the last tile may be narrower, and a row is its own group
    if format.name != "fp8_tile" and K % asked:
        smaller = max((size for size in GROUPS if K % size == 0), default=None)
        other = f"int4:{smaller}" if format.name == "int4" and smaller else "another format"
        raise InvalidInput(
            f"weight has rows of K = {K} numbers, and {asked} of {format.name} share a scale; K must be a multiple: "
            f"pad w and x with zeros, or take {other}"
        )
    return index(asked)


def full_names(module: str) -> tuple[str, ...]:
    """Returns the names that files may have for a module of a decoder, also where the decoder is a part of the model."""
    return module, *(f"{prefix}.{module}" for prefix in _PREFIXES)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern means a module: one with * and ?, or after "re:" a regular expression; "model." may be left out."""
    for name in full_names(module):
        if pattern.startswith("re:"):
            if expression(pattern[3:], f"the pattern {pattern!r} is").match(name):
                return True
        elif fnmatchcase(name, pattern):
            return True
    return False


def expression(text: str, subject: str) -> re.Pattern[str]:
    """Returns a regular expression that somebody else wrote; `subject` begins the sentence that refuses it.

    Raises:
        InvalidInput: it is none, or one that Python cannot hold.
    """
    try:
        return re.compile(text)
    # a count of repetitions that is too large, and parentheses within parentheses without end
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidInput(f"{subject} no regular expression: {error}") from None


def parsed(word: object) -> tuple[str, int | None]:
    """Splits "int4:64" or "int4:row" into the format and its group.

    Raises:
        InvalidInput: it is no such word.
    """
    format, _, group = word.partition(":") if isinstance(word, str) else (word, "", "")
    # the sentence has the whole word, not what is before its colon
    format = weight_format(format if isinstance(word, str) and format in WEIGHT_FORMATS else word).name
    if not group:
        return format, None
    if group == "row":
        return format, ROW
    if not group.isdecimal():
        raise InvalidInput(f"format is {word!r}; after the colon must be a group's size, as in int4:64, or int4:row")
    return format, int(group)
