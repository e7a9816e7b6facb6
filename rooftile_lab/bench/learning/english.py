"""Byte-level English: the text of Python's own language reference, which every Python has, one token per byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftile.errors import InvalidInput

BYTES = 256
# the last part of the text, which no model is trained on
HELD_OUT = 0.1


def corpus() -> Tensor:
    """Returns the text as byte values, one row of int64. Each paragraph is one line, because indentation teaches only spaces."""
    from pydoc_data.topics import topics

    paragraphs = [paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n")]
    text = "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


@dataclass(frozen=True, slots=True)
class English:
    """The text in two parts: one to train on, and one to test on."""

    train: Tensor
    test: Tensor

    @staticmethod
    def read(device: torch.device | str) -> English:
        text = corpus().to(device)
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
