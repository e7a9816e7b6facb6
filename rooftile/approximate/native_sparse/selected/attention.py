"""The operator of attention to chosen blocks, and what runs it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rooftile.approximate.native_sparse.selected import by_block, plain
from rooftile.approximate.native_sparse.selected.tiles import queries_for
from rooftile.errors import Unsupported
from rooftile.runtime.devices import arch, lack_of_kernels, warn_without_triton
from rooftile.runtime.launch import device_of
from rooftile.runtime.operators import below_autograd, define, transformed, wants_grad, watched

LARGEST_DIM = 256
# the rows of a tile are the queries' heads
LARGEST_GROUP = 128
# bytes of a group's queries and outputs that shared memory has room for, beside the keys and values
LARGEST_BYTES = 32768


def attend(
    q: Tensor,  # (B, T, H, D), or (total, H, D) with offsets
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    chosen: Tensor,  # int32 (B, T, Hk, n), -1 for none
    *,
    block_size: int,
    scale: float,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Exact softmax over the tokens of the chosen blocks up to the query's own position.

    Args:
        q: queries.
        k: keys. Query t is at position t + S - T.
        v: values.
        chosen: blocks of `block_size` tokens, within a sequence; all heads of a group choose alike.
        block_size: tokens of a block, a multiple of 16.
        scale: of the scores.
        cu_q: offsets of packed sequences (B + 1,), int32, on the device of q.
        cu_k: the same of keys.
        backend: "auto", "triton" (the kernels) or "plain" (PyTorch's operations).

    Returns:
        o like q with the head dim of v, and lse (B, H, T), packed (H, total), natural, -inf for a query that sees nothing. Both
        have gradients.
    """
    if backend == "triton" and (reason := refusal(q, v, k.shape[-2], block_size)) is not None:
        raise Unsupported(f"backend 'triton' cannot run attention to chosen blocks: {reason}")
    if backend == "auto":
        warn_without_triton(q.is_cuda)
    if cu_q is not None:
        o, lse = _attend(q, k, v, chosen, cu_q, cu_k, scale, block_size, backend)
        return o, lse.T
    B, T = q.shape[:2]
    cu_q, cu_k = (torch.arange(B + 1, device=q.device, dtype=torch.int32) * x.shape[1] for x in (q, k))
    rows, keys, values, choices = (x.flatten(0, 1) for x in (q, k, v, chosen))
    o, lse = _attend(rows, keys, values, choices, cu_q, cu_k, scale, block_size, backend)
    return o.unflatten(0, (B, T)), lse.unflatten(0, (B, T)).transpose(1, 2)


def attend_in_pages(
    q: Tensor, k: Tensor, v: Tensor, pages: Tensor, length: int, chosen: Tensor, *, block_size: int, scale: float
) -> Tensor:  # fmt: skip
    """The same for the last T of a sequence's `length` tokens, whose keys the kernel reads where they lie in a cache.

    Args:
        q: queries (T, H, D), on a device and of sizes that have no `refusal`.
        k: keys (P, size, Hk, D).
        v: values (P, size, Hk, Dv).
        pages: the sequence's pages (N,) int32, N size >= length.
        length: tokens of the sequence.
        chosen: blocks (T, Hk, n) int32.
        block_size: tokens of a block.
        scale: of the scores.

    Returns:
        o (T, H, Dv).
    """
    from rooftile.approximate.native_sparse.selected import kernels

    of_queries, of_keys = (torch.arange(2, device=q.device, dtype=torch.int32) * n for n in (q.shape[0], length))
    with device_of(q):
        q = q if q.stride(-1) == 1 else q.contiguous()
        tiles = kernels.unions(chosen, of_queries, of_keys, block_size, queries_for(q.shape[1] // k.shape[2], q.dtype))
        return kernels.forward(q, k, v, tiles, scale, block_size, pages=pages.contiguous())[0]


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The operator, or its function where no mode or compiler watches; under torch.func the plain operations."""
    if transformed():
        return plain.forward(q, k, v, *rest[:-1])
    if torch.compiler.is_compiling() or watched(q, k, v, *rest):
        found: tuple[Tensor, Tensor] = selected_attention(q, k, v, *rest)
    elif wants_grad(q, k, v):
        found = _Selected.apply(q, k, v, *rest)
    else:
        found = _run(q, k, v, *rest)
    return found


def refusal(q: Tensor, v: Tensor, Hk: int, block_size: int) -> str | None:
    """Why the kernels do not run such a call, or None: what came; what they have."""
    if reason := refusal_of_device(q):
        return reason
    if max(q.shape[-1], v.shape[-1]) > LARGEST_DIM:
        return f"head dims {q.shape[-1]}, {v.shape[-1]}; has up to {LARGEST_DIM}"
    if block_size % 16:
        return f"blocks of {block_size} tokens; has multiples of 16"
    if q.shape[-2] // Hk > LARGEST_GROUP:
        return f"{q.shape[-2] // Hk} query heads to a key head; has up to {LARGEST_GROUP}"
    # matrix products have powers of two
    G, D, Dv = (1 << (n - 1).bit_length() for n in (q.shape[-2] // Hk, q.shape[-1], v.shape[-1]))
    most = LARGEST_BYTES // ((D + Dv) * q.dtype.itemsize)
    if most < G:
        return f"{q.shape[-2] // Hk} query heads to a key head, of dims {q.shape[-1]}, {v.shape[-1]}, {q.dtype}; has up to {most}"
    return None


def refusal_of_device(q: Tensor) -> str | None:
    """Why no kernel runs where q is, or in its dtype."""
    if lack := lack_of_kernels(arch(q.device)):
        return lack
    return "float64; has float32, bfloat16, float16" if q.dtype == torch.float64 else None


def _runs_kernels(q: Tensor, v: Tensor, Hk: int, block_size: int, backend: str) -> bool:
    return backend != "plain" and refusal(q, v, Hk, block_size) is None


def _on(q: Tensor) -> ModuleType:
    """The plain operations for a device: a CPU's read the choices."""
    return by_block if q.device.type == "cpu" else plain


def _run(
    q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, block_size: int, backend: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not _runs_kernels(q, v, k.shape[1], block_size, backend):
        with torch.autocast(q.device.type, enabled=False):
            return _on(q).forward(q, k, v, chosen, cu_q, cu_k, scale, block_size)
    from rooftile.approximate.native_sparse.selected import kernels

    with device_of(q):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        tiles = kernels.unions(chosen, cu_q, cu_k, block_size, queries_for(q.shape[1] // k.shape[1], q.dtype))
        return kernels.forward(q, k, v, tiles, scale, block_size)


def _run_backward(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor,
    scale: float, block_size: int, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not _runs_kernels(q, v, k.shape[1], block_size, backend):
        # a row that sees nothing has an output of 0, whatever do holds
        delta = ((o.to(lse.dtype) * do).sum(-1) - dlse).masked_fill(lse == -torch.inf, 0.0)
        with torch.autocast(q.device.type, enabled=False):
            return _on(q).backward(do, lse, delta, q, k, v, chosen, cu_q, cu_k, scale, block_size)
    from rooftile.approximate.native_sparse.selected import kernels

    with device_of(q):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        do, lse = do.contiguous(), lse.contiguous()
        delta = kernels.deltas(o.contiguous(), do, lse, dlse.contiguous())
        tiles = kernels.unions(chosen, cu_q, cu_k, block_size, queries_for(q.shape[1] // k.shape[1], q.dtype))
        lists = kernels.key_lists(chosen, cu_q, cu_k, k.shape[0], block_size)
        known = do, lse, delta, torch.empty_like(lse), q, k, v
        return kernels.dq(*known, tiles, scale, block_size), *kernels.dkdv(*known, lists, cu_q, cu_k, scale, block_size)


def _fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=wide)


def _fake_backward(do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, cu_q: Tensor, cu_k: Tensor, *rest: Any) -> Any:
        run = selected_attention if watched(q, k, v, chosen) else _run
        with below_autograd():
            o, lse = run(q, k, v, chosen, cu_q, cu_k, *rest)
        ctx.save_for_backward(q, k, v, o, lse, chosen, cu_q, cu_k)
        ctx.rest = rest
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> Any:
        saved = ctx.saved_tensors
        seen = torch.is_grad_enabled() or watched(do, dlse, *saved)
        run = selected_attention_backward if seen else _run_backward
        return *run(do, dlse, *saved, *ctx.rest), *[None] * 6


selected_attention = define(
    "selected_attention(Tensor q, Tensor k, Tensor v, Tensor chosen, Tensor cu_q, Tensor cu_k, float scale, int block, "
    "str backend) -> (Tensor, Tensor)",
    _run, _fake, _Selected.apply, has_gradient=(0, 1, 2),
)  # fmt: skip
selected_attention_backward = define(
    "selected_attention_backward(Tensor do, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor chosen, "
    "Tensor cu_q, Tensor cu_k, float scale, int block, str backend) -> (Tensor, Tensor, Tensor)",
    _run_backward, _fake_backward,
)  # fmt: skip
