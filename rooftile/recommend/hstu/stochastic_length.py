"""Stochastic length: long histories are thinned at random in training, which saves most of the attention's work.

Zhai et al., Actions Speak Louder than Words, arXiv:2402.17152, section 3.3.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_count, check_number, shown
from rooftile.runtime.tensors import check_offsets


def stochastic_length(
    cu: Tensor, longest: int, power: float = 1.6, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draws which rows of each user a step of training sees.

    A user with n rows keeps all of them if n is at most m = longest^(power / 2). A longer one keeps all with probability
    m^2 / n^2, and otherwise m of them, drawn without replacement; their order stays. So a user costs m^2 pairs on average at most
    twice over, whatever its length.

    Args:
        cu: offsets (B + 1,) of users, on the host.
        longest: N, the most rows that a user has; at least 1.
        power: alpha of the paper, above 0 and at most 2; 2 keeps all.
        generator: of the random numbers.

    Returns:
        The rows that are kept (kept,), rising, and the new offsets (B + 1,).

    Raises:
        InvalidInput: an argument is wrong.

    Example:
        >>> rows, offsets = stochastic_length(torch.tensor([0, 10, 1010]), 1000, 1.0)
        >>> int(offsets[1]), rows.shape[0] <= 1010
        (10, True)
    """
    power = check_number("power", power)
    if not 0 < power <= 2:
        raise InvalidInput(f"power is {power}; must be above 0 and at most 2")
    longest = check_count("longest", longest)
    if not isinstance(cu, Tensor) or cu.ndim != 1 or not cu.numel():
        raise InvalidInput(f"cu is {shown(cu)}; must be offsets (B + 1,) of users, int32 or int64")
    cu = check_offsets("cu", cu, int(cu[-1]), "rows", torch.device("cpu"), True)
    most = max(int(longest ** (power / 2)), 1)
    ends = cu.tolist()
    kept, offsets = [], [0]
    for start, stop in itertools.pairwise(ends):
        n = stop - start
        rows = torch.arange(start, stop)
        if n > most and float(torch.rand((), generator=generator)) >= (most / n) ** 2:
            rows = rows[torch.randperm(n, generator=generator)[:most].sort().values]
        kept.append(rows)
        offsets.append(offsets[-1] + rows.shape[0])
    return torch.cat(kept) if kept else torch.empty(0, dtype=torch.long), torch.tensor(offsets, dtype=cu.dtype)
