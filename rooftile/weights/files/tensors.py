"""Checks and conversions of quantised tensors that several families share. Each refusal names the module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.weights import QuantisedWeight
from rooftile.weights.formats import expression
from rooftile.weights.packing import OFFSET, pack, unpack, words_to_bytes

# codes that are checked at once
_AT_ONCE = 1 << 20


def refused(folder: str, what: str) -> InvalidInput:
    """Returns the error to raise about a folder's quantisation_config."""
    return InvalidInput(f"quantization_config of {folder} {what}")


def names_in(section: Mapping[str, Any], keys: Collection[str], folder: str) -> tuple[str, ...]:
    """Returns the list of names under the first of some keys of a quantisation_config that has one; () where none has.

    Raises:
        InvalidInput: it is no list of names, or a name that begins with "re:" is no regular expression.
    """
    for key in keys:
        found = section.get(key)
        if not found:
            continue
        if not isinstance(found, (list, tuple)) or not all(isinstance(name, str) for name in found):
            raise refused(folder, f"has {key} {found!r}; must be a list of names: correct it in config.json")
        for name in found:
            if name.startswith("re:"):
                check_expression(name[3:], name, key, folder)
        return tuple(found)
    return ()


def check_expression(text: str, name: str, key: str, folder: str) -> None:
    """Raises InvalidInput for a pattern of a quantisation_config that is no regular expression."""
    expression(text, f"quantization_config of {folder} has {name!r} in {key}, which is")


def check_shape(module: str, name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raises InvalidInput for a tensor of another shape than is due."""
    if tuple(x.shape) != shape:
        raise InvalidInput(f"{module}.{name} is {tuple(x.shape)}, due {shape}; the checkpoint does not fit its config.json")


def check_dtype(module: str, name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Raises InvalidInput for a tensor of another dtype than is due."""
    if x.dtype != dtype:
        raise InvalidInput(f"{module}.{name} is {x.dtype}, due {dtype}; the checkpoint does not fit its config.json")


def checked_scales(module: str, name: str, scales: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns scales of a shape, above zero and finite; one number stands for all."""
    if not scales.is_floating_point():
        raise InvalidInput(f"{module}.{name} is {scales.dtype}; must be a float dtype")
    if scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(shape).contiguous() if len(shape) == 2 else scales.reshape(shape)
    check_shape(module, name, scales, shape)
    wrong = ~(scales.float().isfinite() & (scales.float() > 0))
    if wrong.any():
        value = scales[wrong][0].item()
        raise InvalidInput(f"{module}.{name} holds {value}; scales must be finite and above zero: download the file again")
    return scales


def checked_codes(module: str, name: str, codes: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Returns codes of a shape and dtype; FP8 holds no NaN."""
    check_dtype(module, name, codes, dtype)
    check_shape(module, name, codes, shape)
    rows = codes.view(torch.uint8).split(max(_AT_ONCE // codes.shape[1], 1))
    if dtype == torch.float8_e4m3fn and any(((some & 127) == 127).any() for some in rows):
        raise InvalidInput(f"{module}.{name} holds NaN; weights must be finite: download the file again")
    return codes


def order_of(module: str, name: str, g_idx: Tensor, K: int, group: int) -> Tensor | None:
    """Returns the order that sorts columns by their groups (act-order); None if they are sorted.

    Raises:
        InvalidInput: an index is out of range, or a group has another number of columns than the others.
    """
    check_shape(module, name, g_idx, (K,))
    groups = g_idx.long()
    if groups.numel() and not (int(groups.min()) >= 0 and int(groups.max()) < K // group):
        bad = groups[(groups < 0) | (groups >= K // group)][0].item()
        raise InvalidInput(f"{module}.{name} holds {bad}; must be from 0 to {K // group - 1}: download the file again")
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], torch.arange(K) // group):
        raise InvalidInput(f"{module}.{name} has groups of several sizes; each must have {group} columns")
    return None if torch.equal(order, torch.arange(K)) else order.int()


def int4_weight(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, order: Tensor | None, group: int, shape: tuple[int, int]
) -> QuantisedWeight:  # fmt: skip
    """Returns a weight of unsigned codes in bytes (N, K / 2), as `pack` makes them, and zero points (N, K / group), 0 to 15.

    Zero points that are all 8 are none.
    """
    if order is not None:
        packed = pack(unpack(packed, shape[1])[:, order.long()])
    if zeros is not None and (zeros == OFFSET).all():
        zeros = None
    signed = None if zeros is None else (zeros.to(torch.int16) - OFFSET).to(torch.int8).contiguous()
    return QuantisedWeight(packed.contiguous(), scales.contiguous(), signed, order, "int4", group, shape)


def packed_codes(words: Tensor, K: int) -> Tensor:
    """Returns the codes of 4 bits in words (N, K / 8) as bytes (N, K / 2)."""
    found = words_to_bytes(words)[:, : -(-K // 2)]
    if K % 2:
        # the last word may be filled up with bits that are no code
        found = torch.cat((found[:, :-1], found[:, -1:] & 15), dim=1)
    return found


def signed_codes(words: Tensor, K: int) -> Tensor:
    """Returns the codes of 8 bits in words (N, K / 4), which have 128 added, as int8 (N, K)."""
    return (words_to_bytes(words)[:, :K] ^ 128).view(torch.int8)


def w8_weight(codes: Tensor, scales: Tensor, order: Tensor | None, group: int) -> QuantisedWeight:
    """Returns a weight of codes in int8 (N, K)."""
    N, K = codes.shape
    codes = codes if order is None else codes[:, order.long()]
    return QuantisedWeight(codes.contiguous(), scales.contiguous(), None, order, "w8", group, (N, K))


def group_of(section: Mapping[str, Any], folder: str, name: str = "group_size") -> int:
    """Returns a group's size from a configuration; -1 stands for a whole row."""
    group = section.get(name)
    group = -1 if group is None else group
    if isinstance(group, bool) or not isinstance(group, int) or (group < 1 and group != -1):
        raise refused(folder, f"has {name} {group!r}; must be a whole number of at least 1, or -1 for whole rows")
    return group


def whole(module: str, group: int, K: int) -> int:
    """Returns a group of a row of K numbers."""
    group = K if group == -1 else group
    if K % group:
        raise InvalidInput(f"{module} has rows of K = {K} numbers and groups of {group}; K must be a multiple")
    return group
