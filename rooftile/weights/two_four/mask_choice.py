"""`two_four`: which weights are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.operators import call, define
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.two_four import definition
from rooftile.weights.two_four.checks import check_flag, check_numbers, check_weight, is_raised, kernels_run_on


@answers_foreign_words
def two_four(weight: Tensor, transposable: bool = False) -> Tensor:
    """Chooses the weights to keep: of each four neighbours along K the two that are largest in size.

    Of weights of one size those with the lower index are kept. A weight that is 2:4 already stays as it is.

    Args:
        weight: (N, K), bf16, fp16, fp32, fp64 or FP8 (e4m3), any strides; K a multiple of 4. Infinity is larger than any number.
        transposable: whether the transposed mask is 2:4, too, so that the gradient of x is a sparse product as well. Each block
            of 4 x 4 takes the one of the 90 patterns with two weights in every row and column whose sum of |weight| is largest
            (in fp32, of fp64 in fp64; of equal sums the lower number in `patterns.py`). N must be a multiple of 4.

    Returns:
        bool (N, K), True where a weight is kept.

    Raises:
        InvalidInput: weight has another dtype or shape, or holds NaN.

    Example:
        >>> two_four(torch.tensor([[1.0, -3.0, 2.0, 0.5]]))
        tensor([[False,  True,  True, False]])

    Mishra et al., arXiv:2104.08378; Hubara et al., arXiv:2102.08124.
    """
    check_weight(weight)
    check_flag("transposable", transposable)
    if transposable and weight.shape[0] % 4:
        raise InvalidInput(f"weight is {tuple(weight.shape)} and transposable is True; N must be a multiple of 4, too")
    return mask_of(weight, bool(transposable), check=True)


def mask_of(w: Tensor, transposable: bool, *, check: bool) -> Tensor:
    """`two_four` of a weight that fits. `check` refuses NaN, and waits for a GPU; otherwise a group with NaN has some mask."""
    found: Tensor = call(two_four_mask, _run, w.detach(), transposable, check)
    return found


def _run(w: Tensor, transposable: bool, check: bool) -> Tensor:
    if w.is_meta or not w.numel():
        return _fake(w, transposable, check)
    if kernels_run_on(w):
        from rooftile.weights.two_four import compression_kernels

        found, flag = compression_kernels.mask(w, transposable)
        if check and is_raised(flag):
            check_numbers(w)
        return found
    if check:
        check_numbers(w)
    return definition.transposable_mask(w) if transposable else definition.row_mask(w)


def _fake(w: Tensor, transposable: bool, check: bool) -> Tensor:
    return torch.empty(w.shape, dtype=torch.bool, device=w.device)


two_four_mask = define("two_four_mask(Tensor w, bool transposable, bool check) -> Tensor", _run, _fake)


def _vmap(info: Any, in_dims: tuple[Any, ...], w: Tensor, transposable: bool, check: bool) -> tuple[Tensor, int]:
    # rows of several weights are rows; blocks of 4 rows do not cross from one weight to the next
    w = w.movedim(in_dims[0], 0)
    return two_four_mask(w.flatten(0, 1), transposable, check).view(w.shape), 0


torch.library.register_vmap("rooftile::two_four_mask", _vmap)
