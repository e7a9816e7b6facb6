"""The operators of a paged cache: writing tokens into their slots, gathering sequences out of blocks, copying blocks.

Each has a definition in plain PyTorch and a kernel in `rooftile.kvcache.page_kernels`. None has a gradient: a cache is for
inference. k_cache and v_cache are one layer's blocks, (blocks, size, heads, dim); a slot is block x size + the place in the
block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.fused.rope import Rotation, rotated_as_defined
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.operators import call, define

# formats of 8 bits, whose numbers have a scale per token and head, and the largest number of each
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# rows of zeros after the last gathered token: a kernel reads up to one tile of keys past it
PAST = 256


def write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, rotation: Rotation | None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes k and v (total, heads, dim) into slots (total,), keys rotated; a token with a slot below 0 is left out.

    With scales (blocks, size, heads), fp32, the cache is in FP8 or INT8; each scale is a head's largest number divided by the
    largest one of the format.
    """
    cos, sin = (None, None) if rotation is None else rotation
    call(_WRITE, _write, k, v, k_cache, v_cache, slots, cos, sin, k_scale, v_scale)


def write_and_rotate(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, rotation: Rotation,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Does what `write` does, and returns q (total, q_heads, dim) rotated like the keys; on a GPU in one kernel."""
    found: Tensor = call(_WRITE_AND_ROTATE, _write_and_rotate, q, k, v, k_cache, v_cache, slots, *rotation, k_scale, v_scale)
    return found


def gather(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Copies keys and values out of their blocks, sequence after sequence, without waiting for the lengths.

    Returns keys and values (room, heads, dim) in `dtype`, and offsets (B + 1,), int32. There is room for all that the table
    (B, N) can hold and `PAST` rows more. The `PAST` rows after the last token are zero; further rows are not defined.
    """
    found: tuple[Tensor, Tensor, Tensor] = call(_GATHER, _gather, k_cache, v_cache, table, lengths, k_scale, v_scale, dtype)
    return found


def copy_blocks(storage: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks of `storage` (blocks, ...); `pairs` (n, 2), int64, are sources and targets, no target is a source."""
    call(_COPY, _copy_blocks, storage, pairs)


@torch.no_grad()
def write_as_defined(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, cos: Tensor | None, sin: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    """Does what `write` does, in plain operations."""
    k = k if cos is None or sin is None else rotated_as_defined(k, Rotation(cos, sin))
    there = slots >= 0
    where = slots[there] // k_cache.shape[1], slots[there] % k_cache.shape[1]
    for x, cache, scales in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        x = x[there]
        if scales is not None:
            wide = x.float()
            scale = wide.abs().amax(-1) / LARGEST[cache.dtype]
            scales[where] = scale
            # a head of zeros has scale 0 and stays zeros
            x = wide / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
            if cache.dtype == torch.int8:
                x = x.round()
        cache[where] = x.to(cache.dtype)


def gathered_as_defined(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Does what `gather` does in plain operations; it reads the lengths, so keys and values have no spare rows.

    Returns keys and values (total, heads, dim) and offsets (B + 1,), int64.
    """
    lengths, size = lengths.long(), k_cache.shape[1]
    cu_k = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(lengths)
    place = torch.arange(sequence.shape[0], device=sequence.device) - cu_k[sequence]
    where = table[sequence, place // size].long(), place % size
    k, v = _rows(k_cache, where), _rows(v_cache, where)
    if k_scale is not None and v_scale is not None:
        k, v = ((x.float() * scale[where].unsqueeze(-1)).to(dtype) for x, scale in ((k, k_scale), (v, v_scale)))
    return k, v, cu_k


def _rows(cache: Tensor, where: tuple[Tensor, Tensor]) -> Tensor:
    # some releases of PyTorch cannot index FP8 on a CPU, so bytes are indexed
    return cache.view(torch.uint8)[where].view(cache.dtype) if cache.element_size() == 1 else cache[where]


def _write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, cos: Tensor | None, sin: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    if runs_kernels(k_cache):
        from rooftile.kvcache import page_kernels

        page_kernels.write(k, v, k_cache, v_cache, slots, cos, sin, k_scale, v_scale)
        return
    write_as_defined(k, v, k_cache, v_cache, slots, cos, sin, k_scale, v_scale)


def _write_and_rotate(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, cos: Tensor, sin: Tensor,
    k_scale: Tensor | None, v_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    if runs_kernels(k_cache):
        from rooftile.kvcache import page_kernels

        rotated: Tensor = page_kernels.write(k, v, k_cache, v_cache, slots, cos, sin, k_scale, v_scale, q)  # type: ignore[assignment]
        return rotated
    write_as_defined(k, v, k_cache, v_cache, slots, cos, sin, k_scale, v_scale)
    with torch.no_grad():
        return rotated_as_defined(q, Rotation(cos, sin))


def _gather(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if runs_kernels(k_cache):
        from rooftile.kvcache import page_kernels

        return page_kernels.gather(k_cache, v_cache, table, lengths, k_scale, v_scale, dtype, PAST)
    with torch.no_grad():
        found = gathered_as_defined(k_cache, v_cache, table, lengths, k_scale, v_scale, dtype)
        k, v, cu_k = _gather_fake(k_cache, v_cache, table, lengths, k_scale, v_scale, dtype)
        for x, part in ((k, found[0]), (v, found[1])):
            x.zero_()[: part.shape[0]] = part
        return k, v, cu_k.copy_(found[2])


def _gather_fake(
    k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor, k_scale: Tensor | None, v_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    room = table.shape[0] * table.shape[1] * k_cache.shape[1] + PAST
    k, v = (x.new_empty((room, *x.shape[2:]), dtype=dtype) for x in (k_cache, v_cache))
    return k, v, lengths.new_empty(lengths.shape[0] + 1, dtype=torch.int32)


def _copy_blocks(storage: Tensor, pairs: Tensor) -> None:
    if runs_kernels(storage):
        from rooftile.kvcache import page_kernels

        page_kernels.copy_blocks(storage, pairs)
        return
    with torch.no_grad():
        storage[pairs[:, 1]] = storage[pairs[:, 0]]


def _nothing(*arguments: object) -> None:
    """The fake of an operator that returns nothing."""


_WRITE = define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor? cos, Tensor? sin, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> ()",
    _write,
    _nothing,
)
_WRITE_AND_ROTATE = define(
    "write_kv_and_rotate(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor cos, "
    "Tensor sin, Tensor(c!)? k_scale, Tensor(d!)? v_scale) -> Tensor",
    _write_and_rotate,
    lambda q, *others: q.new_empty(q.shape),
)
_GATHER = define(
    "gather_kv(Tensor k_cache, Tensor v_cache, Tensor table, Tensor lengths, Tensor? k_scale, Tensor? v_scale, ScalarType dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _gather,
    _gather_fake,
)
_COPY = define("copy_blocks(Tensor(a!) storage, Tensor pairs) -> ()", _copy_blocks, _nothing)
