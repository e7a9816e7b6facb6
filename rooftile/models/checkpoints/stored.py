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


class StackedPart(StoredTensor):
    """The rows of one expert's part in a tensor that has all experts, (E, rows, in), or (E, in, rows) if it is transposed."""

    def __init__(self, whole: StoredTensor, expert: int, rows: slice, *, transposed: bool) -> None:
        super().__init__(whole.file, whole.name)
        self.expert, self.rows, self.transposed = expert, rows, transposed

    def get_tensor(self) -> Tensor:
        stored = self.file.get_slice(self.name)
        part: Tensor = stored[self.expert, :, self.rows].T if self.transposed else stored[self.expert, self.rows]
        return part

    def shape(self) -> tuple[int, ...]:
        inputs = super().shape()[1 if self.transposed else 2]
        return self.rows.stop - self.rows.start, inputs
