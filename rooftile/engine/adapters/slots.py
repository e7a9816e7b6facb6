"""`AdapterSlots`: the memory of the adapters of a decoder, a slot for each, beside each of its projections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rooftile.engine.adapters.folder import Adapter, read_adapter
from rooftile.engine.adapters.groups import FEW, RowGroups, group_rows
from rooftile.engine.adapters.matrices import Matrices
from rooftile.engine.adapters.product import add_adapters
from rooftile.engine.adapters.targets import TargetProjection, Targets
from rooftile.errors import InvalidInput
from rooftile.models import Decoder, ModelConfig

# ranks are padded to what a product with matrix units sums at least
STEP = 16


def padded(rank: int) -> int:
    """Returns the rank that a slot has room for."""
    return -(-rank // STEP) * STEP


class ProjectionSlots:
    """The slots beside one projection, which adds them to what it projects (see `Projection.adapters`)."""

    def __init__(self, target: TargetProjection, slots: int, rank: int, owner: AdapterSlots) -> None:
        placement, outputs = target.projection.placement, target.projection.outputs
        shapes = (slots, target.parts * rank, target.projection.inputs), (slots, rank, outputs)
        a, b = (torch.zeros(shape, dtype=placement.dtype, device=placement.device) for shape in shapes)
        ranks = torch.zeros(slots, target.parts, dtype=torch.int32, device=placement.device)
        self.matrices = Matrices.of(a, b, ranks, target.bounds)
        self._owner = owner

    def add(self, y: Tensor, x: Tensor) -> None:
        """Adds to each row of y (n, out) what its adapter makes of the row of x (n, in)."""
        groups = self._owner.groups
        if groups is not None:
            add_adapters(y, x, self.matrices, groups)


class AdapterSlots:
    """Slots for adapters of one decoder; its projections add what those say.

    Args:
        decoder: the decoder, whose projections know of the slots from now on.
        slots: how many adapters are there at once.
        rank: the largest rank.
        whole: the configuration of the model of which the decoder is a part; None for the decoder's own.

    Raises:
        InvalidInput: there is no memory for them.
    """

    def __init__(self, decoder: Decoder, slots: int, rank: int, whole: ModelConfig | None = None) -> None:
        self.count, self.rank = slots, rank
        self.targets = Targets(decoder, whole)
        if any(each.projection.adapters is not None for each in self.targets.projections):
            raise InvalidInput("the decoder has the adapters of another LLM, which still uses it: make another decoder")
        self.groups: RowGroups | None = None
        """The rows of the step that runs; None if none of them has an adapter."""
        width = padded(rank)
        try:
            self._beside = [ProjectionSlots(each, slots, width, self) for each in self.targets.projections]
        except RuntimeError as error:
            raise InvalidInput(
                f"no memory for {slots} adapters of rank {rank} ({error}): make max_adapters or max_adapter_rank smaller"
            ) from error
        for target, beside in zip(self.targets.projections, self._beside, strict=True):
            target.projection.adapters = beside

    def detach(self) -> None:
        """Takes the slots away from the decoder."""
        for target, beside in zip(self.targets.projections, self._beside, strict=True):
            if target.projection.adapters is beside:
                target.projection.adapters = None

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(each.matrices.a.nbytes + each.matrices.b.nbytes for each in self._beside)

    @contextmanager
    def reading(self, groups: RowGroups | None) -> Iterator[None]:
        """Adds adapters to the rows of the decoder's calls inside the `with` block."""
        self.groups = groups
        try:
            yield
        finally:
            self.groups = None

    @torch.inference_mode()
    def compile(self) -> None:
        """Compiles the kernels, for decode steps and for longer ones; projections of one width share them."""
        kinds = {(each.matrices.a.shape[2], each.matrices.aligned): each.matrices for each in self._beside}
        for matrices in kinds.values() if self._beside[0].matrices.a.is_cuda else ():
            for rows in (1, FEW + 1):
                groups = group_rows(torch.zeros(rows, dtype=torch.int64))
                x, y = (matrices.a.new_zeros(rows, n) for n in (matrices.a.shape[2], matrices.b.shape[2]))
                add_adapters(y, x, matrices, groups._replace(buffer=groups.buffer.to(y.device)))

    def read(self, path: str | Path) -> Adapter:
        """Reads a folder; refuses an adapter that does not fit the slots (see `read_adapter`)."""
        return read_adapter(path, self.targets, self.rank)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Makes a slot add nothing."""
        for beside in self._beside:
            beside.matrices.clear(slot)

    @torch.inference_mode()
    def write(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot, or the part of it that this rank holds."""
        self.clear(slot)
        for target, update in adapter.updates:
            self._beside[target.place].matrices.write(slot, target.part, *target.held(*update))
