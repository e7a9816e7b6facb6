"""Tensors in files, by the names that a decoder has for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class StoredTensor:
    """A tensor in an open file."""

    def __init__(self, file: Any, name: str) -> None:
        self.file, self.name = file, name

    def get_tensor(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    def dtype(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())


class JoinedTensor(StoredTensor):
    """A tensor that files have in pieces, one below the other."""

    def __init__(self, pieces: Sequence[StoredTensor], name: str) -> None:
        super().__init__(None, name)
        self.pieces = pieces

    def get_tensor(self) -> Tensor:
        return torch.cat([piece.get_tensor() for piece in self.pieces])

    def shape(self) -> tuple[int, ...]:
        shapes = [piece.shape() for piece in self.pieces]
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def dtype(self) -> str:
        return self.pieces[0].dtype()
