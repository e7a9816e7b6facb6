"""flash-attn-4's functions: their order of arguments, their layouts, and what they refuse."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.integrations import flash_attn_4
from rooftile.integrations.flash_attn_4 import flash_attn_func, flash_attn_varlen_func

# the parameters of flash_attn.cute.interface in flash-attn-4 4.0.0b36
PARAMETERS = {
    "flash_attn_func": """
        q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic
        score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors block_sparse_tensors_bwd return_lse
        gather_bwd_recompute_p gather_bwd_token_chunk
    """,
    "flash_attn_varlen_func": """
        q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k gather_kv_indices
        page_table softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod
        score_mod_bwd mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata seqlen_k_per_split
        disable_scheduler_metadata gather_bwd_recompute_p gather_bwd_token_chunk
    """,
}


def inputs(*lead: int, S: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(*lead, 4, 32, dtype=dtype)
    k, v = (torch.randn(*lead[:-1], S or lead[-1], 2, 32, dtype=dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_come_in_its_order(name: str) -> None:
    assert list(inspect.signature(getattr(flash_attn_4, name)).parameters) == PARAMETERS[name].split()


def test_dense_calls_are_those_of_attention() -> None:
    q, k, v = inputs(2, 33, S=40)
    sinks = torch.randn(4, requires_grad=True)
    o, lse = flash_attn_func(q, k, v, None, None, 0.2, True, (7, None), sinks, 5.0, return_lse=True)
    due = rt.attention_with_lse(q, k, v, rt.CAUSAL & rt.Window(7), scale=0.2, sinks=sinks, softcap=5.0)
    torch.testing.assert_close((o, lse), due, rtol=0, atol=0)
    (grad,) = torch.autograd.grad(o.sum() + lse.sum(), sinks)
    assert torch.equal(grad, torch.autograd.grad(due[0].sum() + due[1].sum(), sinks)[0])
    o, lse = flash_attn_func(q, k, v)
    assert lse is None
    assert torch.equal(o, rt.attention(q, k, v))


def test_packed_calls_are_those_of_attention_packed() -> None:
    q, k, v = inputs(11)
    cu = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    found = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=7, causal=True, return_lse=True)
    torch.testing.assert_close(found, rt.attention_packed_with_lse(q, k, v, cu, cu, rt.CAUSAL), rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_only_the_used_rows_count(packed: bool) -> None:
    """Each sequence alone, cut to what is used, gives the same; the rest of the output is zero, and no gradient flows there."""
    q, k, v = (x.requires_grad_() for x in inputs(3, 9, dtype=torch.float64))
    used_q, used_k = torch.tensor([9, 0, 4]), torch.tensor([9, 5, 6])
    cu = 9 * torch.arange(4, dtype=torch.int32)
    given = [x.flatten(0, 1) if packed else x for x in (q, k, v)]
    offsets = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {}
    o, lse = flash_attn_varlen_func(*given, seqused_q=used_q, seqused_k=used_k, causal=True, return_lse=True, **offsets)
    due_o, due_lse = torch.zeros(3, 9, 4, 32, dtype=torch.float64), torch.full((3, 4, 9), -torch.inf, dtype=torch.float64)
    for b, (t, s) in enumerate(zip(used_q, used_k, strict=True)):
        one = rt.attention_with_lse(q[b : b + 1, :t], k[b : b + 1, :s], v[b : b + 1, :s], rt.CAUSAL, backend="eager")
        due_o[b, :t], due_lse[b, :, :t] = one[0][0], one[1][0]
    if packed:
        due_o, due_lse = due_o.flatten(0, 1), due_lse.transpose(0, 1).flatten(1)
    assert o.shape == due_o.shape
    torch.testing.assert_close(o, due_o)
    torch.testing.assert_close(lse.double(), due_lse)
    do = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v), do)
    for grad, due in zip(found, torch.autograd.grad(due_o, (q, k, v), do), strict=True):
        torch.testing.assert_close(grad, due)
    assert not found[1][1].any()


def test_pages_are_read_through_their_table() -> None:
    q, k, v = inputs(2, 1, S=32)
    table = torch.tensor([[3, 1], [0, 2]])
    pages = [torch.empty(4, 16, 2, 32) for _ in range(2)]
    for x, held in zip((k, v), pages, strict=True):
        held[table.flatten()] = x.reshape(4, 16, 2, 32)
    used = torch.tensor([20, 32])
    o, lse = flash_attn_varlen_func(q, *pages, seqused_k=used, page_table=table, causal=True, return_lse=True)
    for b in range(2):
        due = rt.attention_with_lse(q[b : b + 1], k[b : b + 1, : used[b]], v[b : b + 1, : used[b]])
        torch.testing.assert_close((o[b : b + 1], lse[b : b + 1]), due)


@pytest.mark.parametrize(
    "name",
    ["qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors"],
)
def test_what_changes_the_result_and_is_missing_is_refused_by_name(name: str) -> None:
    q, k, v = inputs(1, 4)
    for call in (flash_attn_func, flash_attn_varlen_func):
        with pytest.raises(rt.Unsupported, match=f"^{name} is .*; must be None: "):
            call(q, k, v, **{name: torch.ones(1)})


def test_layouts_that_do_not_fit_are_refused() -> None:
    q, k, v = inputs(2, 4)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(rt.InvalidInput, match="with cu_seqlens_q it must be packed"):
        flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu)
    with pytest.raises(rt.InvalidInput, match="without cu_seqlens_k it must be"):
        flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(rt.InvalidInput, match=r"seqused_k is .*; must be \(2,\)"):
        flash_attn_varlen_func(q, k, v, seqused_k=torch.tensor([1]))
    with pytest.raises(rt.InvalidInput, match="page_table came without seqused_k"):
        flash_attn_varlen_func(q, k, v, page_table=torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(rt.Unsupported, match="seqused_q came with page_table"):
        flash_attn_varlen_func(q, k, v, seqused_q=cu, seqused_k=cu, page_table=torch.zeros(2, 1, dtype=torch.int32))
