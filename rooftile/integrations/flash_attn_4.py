"""The functions of the flash-attn-4 package (flash_attn.cute), under their names and in their argument order.

    from rooftile.integrations.flash_attn_4 import flash_attn_func    # was: from flash_attn.cute import flash_attn_func

Version 2 has another order (`rooftile.integrations.flash_attn`): after v come qv, gather_kv_indices, softmax_scale, causal.

The same: layouts, groups, causal aligned bottom-right, None for no bound in window_size, 0.0 for no softcap, (out, lse) as the
result, with None for lse unless return_lse, and gradients for q, k, v and learnable_sink.

Different:

- every device and dtype that Rooftile supports, including fp32 and the CPU, and any head dim; pages of any power of two;
- gradients flow through lse;
- num_splits, pack_gqa, the scheduler's metadata, max_seqlen and min_seqlen do not change the result: Rooftile chooses, and
  ignores them;
- score_mod and mask_mod are refused: masks are values (`rooftile.CAUSAL & rooftile.Window(4)`), and added scores are a `bias`
  of `rooftile.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact import api
from rooftile.exact.ops.unpad import put_rows, take_rows
from rooftile.integrations.flash_attn.arguments import mask_of
from rooftile.kvcache import PagedKV
from rooftile.runtime.arguments import shown

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

_SCORES = "masks are values of rooftile, such as rooftile.CAUSAL, and numbers added to scores are bias=... of rooftile.attention"
# arguments that change the result, and what Rooftile has instead
_REFUSED = {
    "aux_scalars": _SCORES,
    "aux_tensors": _SCORES,
    "block_sparse_tensors": _SCORES,
    "block_sparse_tensors_bwd": _SCORES,
    "gather_bwd_token_chunk": "attention to chosen keys is not there yet",
    "gather_kv_indices": "attention to chosen keys is not there yet",
    "mask_mod": _SCORES,
    "qv": "join q and qv, and k and v, along the last axis",
    "score_mod": _SCORES,
    "score_mod_bwd": _SCORES,
}


def flash_attn_func(
    q: Tensor,  # (B, T, H, D)
    k: Tensor,  # (B, S, Hk, D)
    v: Tensor,  # (B, S, Hk, Dv)
    qv: None = None,
    gather_kv_indices: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,  # (H,)
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: None = None,
    score_mod_bwd: None = None,
    mask_mod: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    block_sparse_tensors: None = None,
    block_sparse_tensors_bwd: None = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: None = None,
) -> tuple[Tensor, Tensor | None]:
    """`rooftile.attention` with flash-attn-4's arguments; the module's docstring lists the differences.

    Returns:
        out (B, T, H, Dv), and softmax's lse (B, H, T), fp32, or None without return_lse.

    Raises:
        Unsupported: one of qv, gather_kv_indices, score_mod, mask_mod and their companions is not None.

    Example:
        >>> q, k, v = (torch.randn(2, 100, 8, 64) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True, window_size=(32, None))[0].shape
        torch.Size([2, 100, 8, 64])
    """
    refuse(locals(), _REFUSED)
    options = _options(softmax_scale, softcap, learnable_sink, deterministic)
    mask = mask_of(causal, window_size)
    if return_lse:
        return api.attention_with_lse(q, k, v, mask, **options)
    return api.attention(q, k, v, mask, **options), None


def flash_attn_varlen_func(
    q: Tensor,  # (total_q, H, D), or (B, T, H, D) without cu_seqlens_q
    k: Tensor,  # (total_k, Hk, D), or (B, S, Hk, D) without cu_seqlens_k, or (P, size, Hk, D) with page_table
    v: Tensor,  # like k, with Dv
    qv: None = None,
    cu_seqlens_q: Tensor | None = None,  # (B + 1,)
    cu_seqlens_k: Tensor | None = None,  # (B + 1,)
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,  # (B,)
    seqused_k: Tensor | None = None,  # (B,)
    gather_kv_indices: None = None,
    page_table: Tensor | None = None,  # (B, N)
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,  # (H,)
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: None = None,
    score_mod_bwd: None = None,
    mask_mod: None = None,
    block_sparse_tensors: None = None,
    aux_tensors: None = None,
    aux_scalars: None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: None = None,
) -> tuple[Tensor, Tensor | None]:
    """`rooftile.attention_packed`, or with page_table `rooftile.attention_paged`, with flash-attn-4's arguments.

    Args:
        seqused_q, seqused_k: the number of first rows of each sequence that count. The others' outputs are zero, their lse -inf.

    Returns:
        out in the layout of q, and lse (H, total_q) or (B, H, T), fp32, or None without return_lse.

    Raises:
        Unsupported: as in `flash_attn_func`, or a page_table with seqused_q.

    Example:
        >>> q, k, v = (torch.randn(10, 4, 64) for _ in range(3))
        >>> cu = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)[0].shape
        torch.Size([10, 4, 64])
    """
    refuse(locals(), _REFUSED)
    options = _options(softmax_scale, softcap, learnable_sink, deterministic)
    mask = mask_of(causal, window_size)
    if page_table is not None:
        found = _paged(q, k, v, page_table, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, mask, options)
        return found if return_lse else (found[0], None)
    queries, keys = UsedRows("q", q, cu_seqlens_q, seqused_q), UsedRows("k", k, cu_seqlens_k, seqused_k)
    rows = [queries.take(q), keys.take(k), keys.take(v)]
    o, lse = api.attention_packed_with_lse(*rows, queries.offsets, keys.offsets, mask, **options)
    return queries.put(o), queries.put_lse(lse) if return_lse else None


class UsedRows:
    """The rows of sequences that count, in a packed (total, H, D) or dense (B, T, H, D) tensor."""

    def __init__(self, name: str, x: Tensor, cu: Tensor | None, used: Tensor | None) -> None:
        due = 4 if cu is None else 3
        if not isinstance(x, Tensor) or x.ndim != due:
            word = f"without cu_seqlens_{name} it must be (B, length, heads, head dim)"
            if cu is not None:
                word = f"with cu_seqlens_{name} it must be packed: (total, heads, head dim)"
            raise InvalidInput(f"{name} is {shown(x)}; {word}")
        self.lead = x.shape[: due - 2]
        if cu is None:
            cu = x.shape[1] * torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device)
        self.offsets, self.rows = cu, None
        if used is None:
            return
        if used.shape != (cu.shape[0] - 1,):
            raise InvalidInput(f"seqused_{name} is {shown(used)}; must be ({cu.shape[0] - 1},), a number for each sequence")
        places = torch.arange(self.lead.numel(), device=x.device)
        sequence = torch.searchsorted(cu[1:].contiguous(), places.to(cu.dtype), right=True).clamp(max=cu.shape[0] - 2)
        self.rows = (places - cu[sequence] < used[sequence]).nonzero()[:, 0]
        lengths = torch.minimum(used.to(cu.dtype), cu.diff())
        self.offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    def take(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, *x.shape[-2:])
        return x if self.rows is None else take_rows(x, self.rows)

    def put(self, o: Tensor) -> Tensor:
        o = o if self.rows is None else put_rows(o, self.rows, self.lead.numel())
        return o.view(*self.lead, *o.shape[-2:])

    def put_lse(self, lse: Tensor) -> Tensor:
        """(H, rows) in the layout that flash-attn has: (H, total_q), or (B, H, T)."""
        if self.rows is not None:
            lse = lse.new_full((lse.shape[0], self.lead.numel()), -torch.inf).index_copy(1, self.rows, lse)
        return lse if len(self.lead) == 1 else lse.unflatten(1, self.lead).transpose(0, 1)


def _paged(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, used_q: Tensor | None,
    used_k: Tensor | None, mask: Any, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if used_q is not None:
        raise Unsupported("seqused_q came with page_table; leave out the rows of q that do not count")
    if used_k is None and cu_k is None:
        raise InvalidInput("page_table came without seqused_k; it must give the number of cached tokens of each sequence")
    lengths = cu_k.diff() if used_k is None and cu_k is not None else used_k
    cache = PagedKV(k, v, table.int(), lengths.int(), None if cu_q is None else cu_q.int())
    return api.attention_paged_with_lse(q, cache, mask, **options)


def refuse(given: dict[str, Any], refused: dict[str, str]) -> None:
    """Raises Unsupported for an argument that Rooftile does not have; `refused` says for each what to do instead."""
    for name, instead in refused.items():
        if given.get(name) is not None:
            raise Unsupported(f"{name} is {shown(given[name])}; must be None: {instead}")


def _options(scale: float | None, softcap: float, sinks: Tensor | None, deterministic: bool) -> dict[str, Any]:
    # in flash-attn, values up to 0 mean none
    return {"scale": scale, "softcap": softcap if softcap > 0 else None, "sinks": sinks, "deterministic": deterministic or None}
