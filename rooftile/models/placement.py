"""`Placement`: how and where the tensors of a model are made, and which part of the model a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftile.errors import InvalidInput

# its class is made of what is imported here
ModelConfig = Any

# rows of a head are dealt out in multiples of it: matrices of another width are slow in 16 bits
ALIGNED = 8


class Placement(NamedTuple):
    """The dtype and device of a model's tensors, and this rank's part of a model that several ranks share.

    Each of N ranks holds 1 / N of the heads of all layers, of the columns of feed-forwards and of the vocabulary in the output
    head, and all of the embedding and the norms (tensor parallelism). The ranks add their outputs up after each part of a layer.
    They all run the same steps on the same tokens, and all get the same hidden states and logits.

    Args:
        dtype, device: of the tensors.
        rank, ranks: this process's number, from 0, and how many share the model.
        add: sums a tensor over all ranks, in place, and returns it. Every rank calls it with the same shape and dtype, fp32 or
            the model's; a CUDA graph must be able to capture it. None for one rank.
        gather: joins the columns (n, w) of all ranks to (n, ranks w), those of rank 0 first; w is the same on all ranks. A CUDA
            graph must be able to capture it. None for one rank.
        deal_experts: whether a rank holds whole experts, 1 / N of them, in place of a slice of each (expert parallelism).

    Example:
        >>> placement = Placement(torch.bfloat16, torch.device("cuda", 1), 1, 2, add, gather)
        >>> decoder = Decoder.from_folder("Llama-3.1-8B", placement=placement)
    """

    dtype: torch.dtype
    device: torch.device
    rank: int = 0
    ranks: int = 1
    add: Callable[[Tensor], Tensor] | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    deal_experts: bool = False

    def part(self, config: ModelConfig) -> ModelConfig:
        """Returns the sizes of the part of a model that this rank holds; refuses what does not fit."""
        return config.part(self.ranks, deal_experts=self.deal_experts)

    def parameter(self, *size: int) -> nn.Parameter:
        """Returns an uninitialised parameter, to be filled with weights later; it has no gradient."""
        return nn.Parameter(torch.empty(size, dtype=self.dtype, device=self.device), requires_grad=False)

    def summed(self, x: Tensor) -> Tensor:
        """Returns the sum of x over the ranks; x may be overwritten."""
        return x if self.add is None else self.add(x)

    def columns(self, vocabulary: int) -> slice:
        """Returns the rows of an output head that this rank holds; the last ranks may hold fewer rows than others."""
        each = self._width(vocabulary)
        return slice(min(self.rank * each, vocabulary), min((self.rank + 1) * each, vocabulary))

    def joined(self, scores: Tensor, vocabulary: int) -> Tensor:
        """Returns the scores (n, vocabulary) of which each rank has its columns."""
        if self.gather is None:
            return scores
        lacking = self._width(vocabulary) - scores.shape[1]
        scores = functional.pad(scores, (0, lacking)) if lacking else scores
        return self.gather(scores)[:, :vocabulary].contiguous()

    def _width(self, vocabulary: int) -> int:
        if self.ranks == 1:
            return vocabulary
        return -(-vocabulary // (self.ranks * ALIGNED)) * ALIGNED


def placed(placement: Placement | None, dtype: torch.dtype | None, device: torch.device | str | None) -> Placement:
    """Returns the placement that is given, or one rank's on a device.

    Raises:
        InvalidInput: neither a placement nor a dtype is given, they contradict each other, or the rank is none of the ranks.
    """
    wanted = None if device is None else torch.device(device)
    if placement is None:
        if dtype is None:
            raise InvalidInput("dtype is None and no placement is given; give one of them")
        return Placement(dtype, torch.get_default_device() if wanted is None else wanted)
    if not 0 <= placement.rank < placement.ranks:
        raise InvalidInput(f"the rank is {placement.rank} of {placement.ranks} ranks; must be from 0 to {placement.ranks - 1}")
    its = placement.device
    if dtype not in (None, placement.dtype) or (wanted is not None and wanted not in (its, torch.device(its.type))):
        raise InvalidInput(
            f"dtype is {dtype}, device {device}, and the placement has {placement.dtype} on {its}; give the placement alone"
        )
    return placement
