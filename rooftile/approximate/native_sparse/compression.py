"""Compression: keys or values in blocks, each mapped to one vector.

Yuan et al., Native Sparse Attention, arXiv:2502.11089, section 3.3.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.chosen_arguments import as_given
from rooftile.errors import InvalidInput
from rooftile.recurrent.split.context import follows_context
from rooftile.runtime.arguments import check_count, shown
from rooftile.runtime.tensors import check_offsets
from rooftile.runtime.words import answers_foreign_words

Phi = str | Tensor | Callable[[Tensor], Tensor]


@follows_context()
@answers_foreign_words
def compress(
    x: Tensor,  # (B, S, Hk, D)
    *,
    cu: Tensor | None = None,
    length: int = 32,
    phi: Phi = "mean",
    places: Tensor | None = None,
    stride: int = 16,
) -> Tensor:
    """Keys or values in blocks of `length` tokens, one every `stride`, each block mapped to one vector.

    Args:
        x: keys or values (B, S, Hk, D); with cu packed (total, Hk, D).
        cu: offsets (B + 1,) of packed sequences, which are read: that waits for a GPU.
        length: tokens per block, a multiple of stride.
        phi: "mean"; weights of the tokens, a tensor (l,) or (Hk, l); a linear map, a tensor (Hk or 1, l D, D'); or a function
            of blocks (B, n, Hk, l, D) that returns (B, n, Hk, D'), such as an MLP, which the paper has.
        places: a vector for each place in a block, (l, D) or (Hk, l, D), added before phi.
        stride: tokens between the beginnings of two blocks.

    Returns:
        (B, n, Hk, D') with n = (S - length) // stride + 1, none for a shorter text; with cu (sum of n, Hk, D').

    Example:
        >>> compress(torch.randn(1, 256, 4, 64)).shape
        torch.Size([1, 15, 4, 64])
    """
    if cu is not None:
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise InvalidInput(f"x is {shown(x)}; with cu it must be packed (total, Hk, D)")
        ends = check_offsets("cu", cu, x.shape[0], "tokens", x.device, False).tolist()
        parts = [x[None, a:b] for a, b in itertools.pairwise(ends)] or [x[None]]
        words: dict[str, Any] = {"length": length, "phi": phi, "places": places, "stride": stride}
        return torch.cat([compress(part, **words)[0] for part in parts])
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        raise InvalidInput(f"x is {shown(x)}; must be a floating-point tensor (B, S, Hk, D)")
    length, stride = check_lengths(length, stride)
    n = max((x.shape[1] - length) // stride + 1, 0)
    x = x if n else x.new_zeros(x.shape[0], length, *x.shape[2:])
    blocks = x.unfold(1, length, stride).transpose(-1, -2)[:, :n]  # (B, n, Hk, l, D)
    if places is not None:
        blocks = blocks + _places(places, x, length).to(x.dtype)
    return _mapped(blocks, phi)


def _places(places: Any, x: Tensor, length: int) -> Tensor:
    (Hk, D), due = x.shape[2:], "(l, D) or (Hk, l, D)"
    if not isinstance(places, Tensor) or tuple(places.shape) not in ((length, D), (Hk, length, D)):
        raise InvalidInput(f"places is {shown(places)}; must be {due}, with l = {length}, Hk = {Hk} and D = {D}")
    return places


def _mapped(blocks: Tensor, phi: Phi) -> Tensor:
    """phi of blocks (B, n, Hk, l, D): (B, n, Hk, D'). Sums are in fp32."""
    Hk, length, D = blocks.shape[2:]
    wide = torch.promote_types(blocks.dtype, torch.float32)
    if isinstance(phi, str):
        if phi != "mean":
            raise InvalidInput(f"phi is {phi!r}; must be 'mean', a tensor or a function")
        return blocks.mean(-2, dtype=wide).to(blocks.dtype)
    if not isinstance(phi, Tensor):
        if not callable(phi):
            raise InvalidInput(f"phi is {shown(phi)}; must be 'mean', a tensor or a function")
        found = phi(blocks)
        if not isinstance(found, Tensor) or found.shape[:-1] != blocks.shape[:3]:
            raise InvalidInput(f"phi returned {shown(found)}; must be a tensor (B, n, Hk, D') for {tuple(blocks.shape)}")
        return found
    if tuple(phi.shape) in ((length,), (Hk, length)):
        with as_given(blocks):
            return torch.einsum("bnhld,hl->bnhd", blocks.to(wide), phi.to(wide).expand(Hk, length)).to(blocks.dtype)
    if phi.ndim == 3 and phi.shape[0] in (1, Hk) and phi.shape[1] == length * D:
        return torch.einsum("bnhx,hxe->bnhe", blocks.flatten(3), phi.to(blocks.dtype).expand(Hk, -1, -1))
    due = f"(l,), (Hk, l) or (Hk or 1, l D, D'), with l = {length}, Hk = {Hk} and D = {D}"
    raise InvalidInput(f"phi is {shown(phi)}; must be a tensor {due}, 'mean' or a function")


def check_lengths(length: Any, stride: Any, block_size: Any = None) -> Any:
    """The lengths of a compression block, of its stride, and of a selected block, if that is given."""
    length, stride = check_count("length", length), check_count("stride", stride)
    if length % stride:
        raise InvalidInput(f"length is {length}; must be a multiple of stride, {stride}")
    if block_size is None:
        return length, stride
    block_size = check_count("block_size", block_size)
    if block_size % stride:
        raise InvalidInput(f"block_size is {block_size}; must be a multiple of stride, {stride}")
    if length > block_size:
        raise InvalidInput(f"length is {length}; must be at most block_size, {block_size}")
    return length, stride, block_size


def check_compressed(x: Tensor, S: int, length: int, stride: int) -> None:
    """Raises InvalidInput unless there are as many compressed keys as a text of S tokens has."""
    due = max((S - length) // stride + 1, 0)
    if x.shape[1] != due:
        raise InvalidInput(f"compressed has {x.shape[1]} keys; {S} tokens in blocks of {length} every {stride} have {due}")
