"""The words for the formats of a weight: the formats of `rooftile.quantise_weight`, and "2:4", which masks and rounds nothing."""

from __future__ import annotations

from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.words import format_answer
from rooftile.weights import QuantisedWeight, quantise_weight, weight_format
from rooftile.weights.formats import WEIGHT_FORMATS, group_of, parsed
from rooftile.weights.two_four import TwoFour, compress, two_four

SPARSE = "2:4"


def check_word(word: object, *others: str) -> None:
    """Checks the word for a format.

    Raises:
        InvalidInput: it is none, and none of `others`.
    """
    if isinstance(word, str) and (word in (SPARSE, *others) or word.partition(":")[0] in WEIGHT_FORMATS):
        if word not in (SPARSE, *others):
            parsed(word)
        return
    words = ", ".join((*WEIGHT_FORMATS, SPARSE, *others))
    raise InvalidInput(f"format is {word!r}; must be one of {words}{format_answer(word)}")


def why_not(word: str, K: int) -> str:
    """Returns why rows of K numbers cannot be in a format; "" if they can."""
    if word == SPARSE:
        return f"rows have {K} numbers, and 2:4 needs a multiple of 4" if K % 4 else ""
    format, group = parsed(word)
    try:
        group_of(weight_format(format), K, group)
    except InvalidInput as error:
        return str(error)
    return ""


def check_fits(name: str, word: str, K: int) -> None:
    """Checks that rows of K numbers can be in a format.

    Raises:
        InvalidInput: they cannot.
    """
    why = why_not(word, K)
    if why and word == SPARSE:
        why += ": leave this layer out, as LLM(weights={pattern: format}) does"
    if why:
        raise _refused(name, word, why)


def weight_in(w: Tensor, word: str, name: str) -> QuantisedWeight | TwoFour:
    """Returns the weight w (N, K) of a layer as `rooftile.linear` multiplies it in a format.

    A 2:4 weight keeps the two largest of each four neighbours, as they are.

    Raises:
        InvalidInput: its rows do not fit, it is not finite, or for 2:4 it holds NaN.
    """
    check_fits(name, word, w.shape[-1])
    try:
        if word == SPARSE:
            return compress(w, two_four(w))
        format, group = parsed(word)
        return quantise_weight(w, format, group=group)
    except InvalidInput as error:
        raise _refused(name, word, error) from None


def _refused(name: str, word: str, why: object) -> InvalidInput:
    what = word if word == SPARSE else f"quantised to {word}"
    return InvalidInput(f"{name}.weight cannot be {what}: {why}")
