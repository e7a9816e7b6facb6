"""Byte-level English that every Python has, one token per byte: its language reference, and the docs of its standard library."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rooftile.errors import InvalidInput

BYTES = 256
# the last part of the text, which no model is trained on
HELD_OUT = 0.1


# shorter docstrings say what their names say
SHORTEST = 80
# folders of a Python's library that hold other people's packages, or text that is no prose
SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data")


def corpus() -> Tensor:
    """Returns the text as byte values, one row of int64. Each paragraph is one line, because indentation teaches only spaces."""
    return _bytes_of(_topics())


@cache
def library() -> Tensor:
    """Returns the text of `corpus`, and behind it the docstrings of the standard library in the order of a fixed shuffle.

    It is four times as long, so that a small model does not learn it by heart in a short training. The held-out end is of
    docstrings, from all over the library.
    """
    docs = list(_docstrings(Path(sysconfig.get_paths()["stdlib"])))
    order = torch.randperm(len(docs), generator=torch.Generator().manual_seed(0)).tolist()
    return _bytes_of([*_topics(), *(docs[n] for n in order)])


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _docstrings(folder: Path) -> Iterator[str]:
    """The docstrings of all modules below a folder, without the docstrings of tests and of installed packages."""
    for file in sorted(folder.rglob("*.py")):
        if any(part in SKIPPED for part in file.relative_to(folder).parts):
            continue
        try:
            found = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            # a library has files that are broken on purpose
            continue
        for node in ast.walk(found):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= SHORTEST:
                    yield text


def _bytes_of(texts: Iterable[str]) -> Tensor:
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    whole = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())
    return torch.frombuffer(bytearray(whole.encode()), dtype=torch.uint8).long()


@dataclass(frozen=True, slots=True)
class English:
    """The text in two parts: one to train on, and one to test on."""

    train: Tensor
    test: Tensor

    @staticmethod
    def read(device: torch.device | str, *, long: bool = False) -> English:
        """The text of `corpus`, or with `long` the text of `library`."""
        text = (library() if long else corpus()).to(device)
        border = round(len(text) * (1 - HELD_OUT))
        return English(text[:border], text[border:])

    def draw(self, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random pieces to train on: tokens (batch, length), and the tokens after each, the same shape."""
        starts = torch.randint(len(self.train) - length, (batch,), generator=generator, device=generator.device)
        return _pieces(self.train, starts, length)

    def tests(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Pieces of the held-out text at even distances, the same for every model."""
        if len(self.test) <= length + 1:
            raise InvalidInput(f"length is {length:,}; the held-out text has {len(self.test):,} bytes: ask for shorter pieces")
        return _pieces(self.test, torch.linspace(0, len(self.test) - length - 1, batch, device=self.test.device).long(), length)


def _pieces(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    places = starts[:, None] + torch.arange(length + 1, device=text.device)
    pieces = text[places]
    return pieces[:, :-1], pieces[:, 1:]
