"""The words for dtypes: one list for Python, the command line and config.json.

Importing this module does not import torch, so that a command refuses a wrong word at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    import torch

# the word that this library prints, and the others that mean the same; the second is torch's own name
WORDS = {
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
    "fp32": ("fp32", "float32", "float"),
    "fp64": ("fp64", "float64", "double"),
}
_SHORT = {word: short for short, words in WORDS.items() for word in words}


def dtype_word(given: object, *, name: str = "dtype", has: tuple[str, ...] = tuple(WORDS), auto: bool = False) -> str:
    """Returns the word that this library prints for a dtype.

    Args:
        given: a word, with or without "torch." before it, or a dtype of torch.
        name: the argument, for the error.
        has: the dtypes that are accepted there.
        auto: whether "auto" is accepted, too.

    Raises:
        InvalidInput: it is none of them.

    Example:
        >>> dtype_word("torch.bfloat16"), dtype_word("half")
        ('bf16', 'fp16')
    """
    if auto and given == "auto":
        return "auto"
    # a dtype of torch prints with "torch." before its name
    short = _SHORT.get(str(given).removeprefix("torch."))
    if short is None or short not in has:
        due = ", ".join([*(["auto"] if auto else []), *(f"{one} ({', '.join(WORDS[one][1:])})" for one in has)])
        raise InvalidInput(f"{name} is {str(given)[:60]!r}; must be one of {due}")
    return short


def torch_dtype(given: object, *, name: str = "dtype", has: tuple[str, ...] = tuple(WORDS)) -> torch.dtype:
    """Returns a dtype of torch for what `dtype_word` accepts."""
    import torch

    dtype: torch.dtype = getattr(torch, WORDS[dtype_word(given, name=name, has=has)][1])
    return dtype
