"""Tensors in files, by the names that a decoder has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.errors import InvalidInput

# the slices of a tensor along each axis; on one axis at most there are several
Cut = tuple[tuple[slice, ...], ...]


class Share(NamedTuple):
    """The part of a tensor that a rank holds, () for none of it, and the shape of the whole."""

    cut: Cut
    whole: tuple[int, ...]


class StoredTensor:
    """A tensor in an open file."""

    def __init__(self, file: Any, name: str) -> None:
        self.file, self.name = file, name

    def get_tensor(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def get_part(self, cut: Cut) -> Tensor:
        """Reads the slices of a tensor, and nothing else, and joins them along their axis."""
        return slices_of(self.file.get_slice(self.name), cut)

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

    def get_part(self, cut: Cut) -> Tensor:
        rows, *rest = cut
        found, start = [], 0
        for piece in self.pieces:
            stop = start + piece.shape()[0]
            inside = [slice(max(one.start, start) - start, min(one.stop, stop) - start) for one in rows]
            found += [piece.get_part(((one,), *rest)) for one in inside if one.start < one.stop]
            start = stop
        return torch.cat(found)

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
        rows, inputs = self.shape()
        return self.get_part(((slice(0, rows),), (slice(0, inputs),)))

    def get_part(self, cut: Cut) -> Tensor:
        rows, inputs = cut
        stored, e = self.file.get_slice(self.name), self.expert
        shifted = [slice(self.rows.start + one.start, self.rows.start + one.stop) for one in rows]
        if self.transposed:
            return joined_slices([stored[e, columns, one].T for one, columns in product(shifted, inputs)], cut)
        return joined_slices([stored[e, one, columns] for one, columns in product(shifted, inputs)], cut)

    def shape(self) -> tuple[int, ...]:
        inputs = super().shape()[1 if self.transposed else 2]
        return self.rows.stop - self.rows.start, inputs


class CutTensor(StoredTensor):
    """The part of a tensor that a rank holds."""

    def __init__(self, whole: StoredTensor, cut: Cut) -> None:
        super().__init__(whole.file, whole.name)
        self.whole, self.cut = whole, cut

    def get_tensor(self) -> Tensor:
        return self.whole.get_part(self.cut)

    def shape(self) -> tuple[int, ...]:
        return tuple(sum(one.stop - one.start for one in slices) for slices in self.cut)

    def dtype(self) -> str:
        return self.whole.dtype()


def slices_of(x: Any, cut: Cut) -> Tensor:
    """Returns the slices of a tensor, or of a slice of a file, joined along their axis."""
    return joined_slices([x[slices] for slices in product(*cut)], cut)


def joined_slices(pieces: Sequence[Tensor], cut: Cut) -> Tensor:
    """Joins the slices of a cut, in their order, along the axis on which there are several."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(list(pieces), dim=next(axis for axis, slices in enumerate(cut) if len(slices) > 1))


def cut_tensors(found: Mapping[str, StoredTensor], shares: Mapping[str, Share]) -> dict[str, StoredTensor]:
    """Returns stored tensors of which only the parts of a rank are read, and leaves out what the rank has no part in.

    Raises:
        InvalidInput: one has another shape than the model's.
    """
    # whatever else a quantised module has goes with its weight
    others = {name.rpartition(".")[0] for name, share in shares.items() if not share.cut}
    kept = {name: one for name, one in found.items() if name.rpartition(".")[0] not in others}
    found = kept.copy()
    for name in found.keys() & shares.keys():
        cut, whole = shares[name]
        if found[name].shape() != whole:
            raise InvalidInput(
                f"the checkpoint's shapes differ from its config.json: {found[name].name} {found[name].shape()}, due {whole}"
            )
        kept[name] = CutTensor(found[name], cut)
    return kept
