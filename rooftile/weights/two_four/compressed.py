"""`TwoFour`: a weight of which two of each four neighbours are stored, and `compress`, which makes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.operators import call, define
from rooftile.runtime.words import answers_foreign_words, answers_words
from rooftile.weights.two_four import definition
from rooftile.weights.two_four.checks import HELD, check_weight, is_raised, kernels_run_on


@answers_words
@dataclass(frozen=True, slots=True, repr=False, eq=False)
class TwoFour:
    """A weight (N, K) with two of each four neighbours along K, as `compress` makes it, for `linear`. It has no gradient.

    Args:
        values: (N, K / 2), bf16, fp16, fp32, fp64, FP8 (e4m3) or INT8: the first and the second value of each four.
        places: uint8 (N, K / 8), rounded up: the index of a group's first value in two bits, and its second's, which is
            larger, in the next two; the lower half of a byte is the first of two groups.
        shape: (N, K).
        scales: FP8, INT8: fp32 (N, 1), what a row's values are multiplied by.

    Raises:
        InvalidInput: a tensor has another shape or dtype than it must have.
    """

    values: Tensor
    places: Tensor
    shape: tuple[int, int]
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        N, K = self.shape
        if K % 4:
            raise InvalidInput(f"shape is {self.shape}; K must be a multiple of 4")
        due = {"values": ((N, K // 2), HELD), "places": ((N, -(-K // 8)), (torch.uint8,)), "scales": ((N, 1), (torch.float32,))}
        for name, (shape, dtypes) in due.items():
            x = getattr(self, name)
            if not isinstance(x, Tensor) and (x is not None or name != "scales"):
                raise InvalidInput(f"{name} of a 2:4 weight {self.shape} are {type(x).__name__}; must be a tensor {shape}")
            if x is not None and (tuple(x.shape) != shape or x.dtype not in dtypes):
                words = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise InvalidInput(f"{name} of a 2:4 weight {self.shape} are {x.dtype} {tuple(x.shape)}; must be {words} {shape}")
        if self.scales is not None and self.values.element_size() > 1:
            raise InvalidInput(f"scales are given and values are {self.values.dtype}; only FP8 and INT8 have scales")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: 9/16 of the dense weight in 16 bits, 5/8 in FP8 and INT8."""
        return sum(x.nbytes for x in (self.values, self.places, self.scales) if x is not None)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the weight (N, K) with zeros between its values: exactly what was kept, in the dtype of the values.

        With scales it is value times scale in fp32, rounded to `dtype`.

        Example:
            >>> w = torch.tensor([[1.0, -3.0, 2.0, 0.5]])
            >>> compress(w, two_four(w)).dense()
            tensor([[ 0., -3.,  2.,  0.]])
        """
        found: Tensor = call(two_four_dense, _run_dense, self.values, self.places, self.shape[1])
        if self.scales is not None:
            found = found.float() * self.scales
        return found if dtype is None else found.to(dtype)

    def to(self, device: torch.device | str) -> TwoFour:
        """Returns the weight on a device."""
        scales = None if self.scales is None else self.scales.to(device)
        return TwoFour(self.values.to(device), self.places.to(device), self.shape, scales)

    def __repr__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"TwoFour({self.shape}, {name}, {self.nbytes:,} bytes on {self.device})"


@answers_foreign_words
def compress(weight: Tensor, mask: Tensor, scales: Tensor | None = None) -> TwoFour:
    """Keeps the weights under a mask, and drops the others.

    Args:
        weight: (N, K), bf16, fp16, fp32, fp64, FP8 (e4m3) or INT8, any strides.
        mask: bool (N, K), True for exactly two of each four neighbours along K: from `two_four`.
        scales: fp32 (N, 1), of the rows of an FP8 or INT8 weight.

    Raises:
        InvalidInput: dtypes, shapes or devices do not fit, or a group keeps another number of weights than two.

    Example:
        >>> w = torch.randn(64, 128, dtype=torch.bfloat16)
        >>> weight = compress(w, two_four(w))
        >>> weight.nbytes / w.nbytes
        0.5625
    """
    check_weight(weight, HELD)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != weight.shape:
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(f"mask is {what}; must be bool {tuple(weight.shape)}, as two_four returns it")
    if mask.device != weight.device:
        raise InvalidInput(f"weight is on {weight.device} and mask on {mask.device}; must be on one device")
    values, places = call(two_four_compress, _run, weight.detach(), mask)
    return TwoFour(values, places, (weight.shape[0], weight.shape[1]), scales)


def _run(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if w.is_meta or not w.numel():
        return _fake(w, mask)
    if kernels_run_on(w):
        from rooftile.weights.two_four import compression_kernels

        values, places, flag = compression_kernels.compress(w, mask)
        if is_raised(flag):
            _check_mask(mask)
        return values, places
    _check_mask(mask)
    return definition.compressed(w, mask)


def _check_mask(mask: Tensor) -> None:
    # a sum in int64 would take eight times the bytes of the mask
    wrong = mask.unflatten(1, (-1, 4)).sum(-1, dtype=torch.uint8) != 2
    if wrong.any():
        row, group = (int(n) for n in wrong.nonzero()[0])
        count = int(mask[row, 4 * group : 4 * group + 4].sum())
        raise InvalidInput(
            f"mask keeps {count} of columns {4 * group} to {4 * group + 3} in row {row}; must keep two: take the mask of two_four"
        )


def _fake(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    N, K = w.shape
    return w.new_empty(N, K // 2), w.new_empty(N, (K + 7) // 8, dtype=torch.uint8)


def _run_dense(values: Tensor, places: Tensor, K: int) -> Tensor:
    if values.is_meta or not values.numel():
        return _fake_dense(values, places, K)
    if kernels_run_on(values):
        from rooftile.weights.two_four import compression_kernels

        return compression_kernels.dense(values, places, K)
    return definition.dense(values, places, K)


def _fake_dense(values: Tensor, places: Tensor, K: int) -> Tensor:
    return values.new_empty(values.shape[0], K)


two_four_compress = define("two_four_compress(Tensor w, Tensor mask) -> (Tensor, Tensor)", _run, _fake)
two_four_dense = define("two_four_dense(Tensor values, Tensor places, SymInt K) -> Tensor", _run_dense, _fake_dense)


def _batched(x: Tensor, dim: int | None, size: int) -> Tensor:
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap(info: Any, in_dims: tuple[Any, ...], w: Tensor, mask: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    flat = [_batched(x, dim, info.batch_size) for x, dim in zip((w, mask), in_dims, strict=True)]
    values, places = two_four_compress(*flat)
    return (values.unflatten(0, (info.batch_size, -1)), places.unflatten(0, (info.batch_size, -1))), (0, 0)


def _vmap_dense(info: Any, in_dims: tuple[Any, ...], values: Tensor, places: Tensor, K: int) -> tuple[Tensor, int]:
    flat = [_batched(x, dim, info.batch_size) for x, dim in zip((values, places), in_dims[:2], strict=True)]
    return two_four_dense(*flat, K).unflatten(0, (info.batch_size, -1)), 0


torch.library.register_vmap("rooftile::two_four_compress", _vmap)
torch.library.register_vmap("rooftile::two_four_dense", _vmap_dense)
