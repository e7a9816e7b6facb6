"""Quantised modules that are read whole, of which a rank keeps its part: layouts pack rows and columns in ways of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from rooftile.models.checkpoints.gpt_oss import BlockTensor
from rooftile.models.checkpoints.stored import Share, StoredTensor
from rooftile.weights import QuantisedWeight
from rooftile.weights.files.plan import Quantiser, Reader
from rooftile.weights.part import part_of
from rooftile.weights.two_four import TwoFour


@dataclass(frozen=True, slots=True)
class WholeModules:
    """The shares of a rank in modules that a checkpoint has quantised, by the names of their weights.

    Args:
        shares: by the names of plain weights; none for one rank, and where plain weights are quantised while they are read.
        transposed: whether the plain weights would be (in, out), as GPT-2's are.
    """

    shares: Mapping[str, Share]
    transposed: bool

    def shape(self, module: str, held: tuple[int, int]) -> tuple[int, int]:
        """Returns the shape of a whole module, of which a rank holds (N, K)."""
        share = self.shares.get(f"{module}.weight")
        if share is None:
            return held
        rows, columns = share.whole[::-1] if self.transposed else share.whole
        return rows, columns

    def part(self, module: str, weight: QuantisedWeight | TwoFour) -> QuantisedWeight | TwoFour:
        """Returns the part of a module's weight that the rank holds."""
        share = self.shares.get(f"{module}.weight")
        if share is None:
            return weight
        rows, (columns,) = share.cut[::-1] if self.transposed else share.cut
        return part_of(weight, rows, columns, f"{module}.weight")

    def part_of_stack(self, name: str, weight: QuantisedWeight) -> QuantisedWeight | TwoFour:
        """Returns the part of the weight of all experts, one expert below the other."""
        if name not in self.shares:
            return weight
        (experts, rows, (columns,)), (_, height, _) = self.shares[name]
        each = [n * height for one in experts for n in range(one.start, one.stop)]
        return part_of(weight, [slice(n + one.start, n + one.stop) for n, one in product(each, rows)], columns, name)


def read_whole(
    shares: Mapping[str, Share], found: Mapping[str, StoredTensor], modules: Collection[str], reader: Reader, *, transposed: bool
) -> WholeModules:  # fmt: skip
    """Returns the shares in what is read whole: modules that the checkpoint has quantised."""
    quantised = [] if isinstance(reader, Quantiser) else [f"{name}.weight" for name in modules if reader.covers(name)]
    blocks = [name for name, one in found.items() if isinstance(one, BlockTensor)]
    return WholeModules({name: shares[name] for name in (*quantised, *blocks) if name in shares}, transposed)
