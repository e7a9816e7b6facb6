"""A linear projection whose rows have the same bits whatever the other rows are, and however many.

PyTorch's product picks its kernel, and with it the order of its sums, by the number of rows: a token's last bits depend on how
many others are computed with it. Here every row is part of a tile of one size, whose columns are summed in one order.

He et al., Defeating Nondeterminism in LLM Inference, Thinking Machines Lab, 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.fused import kernels
from rooftile.fused.where import kernels_run_on
from rooftile.runtime.operators import call, define, needs_steps
from rooftile.runtime.words import answers_foreign_words

# rows of a tile of the definition
ROWS = 16


@answers_foreign_words
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (total, in) times weight (out, in) transposed, plus bias (out,): (total, out), batch-invariant.

    All tensors have one dtype. A row's bits depend on that row, the weight and the bias alone, except under
    `torch.vmap`, which joins the products of its samples.

    Example:
        >>> x, weight = torch.randn(5, 64), torch.randn(48, 64)
        >>> torch.equal(linear(x[:1], weight), linear(x, weight)[:1])
        True
    """
    if needs_steps(x, weight, bias):
        return linear_as_defined(x, weight, bias)
    found: Tensor = call(_LINEAR, _linear, x, weight, bias)
    return found


def linear_as_defined(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` in plain operations: PyTorch's product of ROWS rows at a time, the last of them padded with zeros."""
    padded = functional.pad(x, (0, 0, 0, -x.shape[0] % ROWS))
    # each tile is a tensor of its own: MKL's sums also depend on how its arguments are aligned
    parts = [functional.linear(tile.clone(), weight, bias) for tile in padded.split(ROWS)]
    return torch.cat(parts)[: x.shape[0]]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # the kernel sums in fp32
    if kernels_run_on(x):
        return kernels.linear.linear(x, weight, bias)
    return linear_as_defined(x, weight, bias).contiguous()


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


_LINEAR = define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _linear, _fake)
