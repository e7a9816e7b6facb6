"""FlashAttention-3's functions: their order of arguments, their results, and what they refuse."""

from __future__ import annotations

import inspect

import pytest
import torch

import rooftile as rt
from rooftile.integrations import flash_attn, flash_attn_3
from rooftile.kvcache import PagedKV

# the parameters of flash_attn_interface in FlashAttention-3
PARAMETERS = {
    "flash_attn_func": """
        q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa
        deterministic sm_margin return_attn_probs
    """,
    "flash_attn_varlen_func": """
        q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv q_descale k_descale
        v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs
    """,
    "flash_attn_with_kvcache": """
        q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table cu_seqlens_q
        cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size
        attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse
    """,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_arguments_come_in_its_order(name: str) -> None:
    assert list(inspect.signature(getattr(flash_attn_3, name)).parameters) == PARAMETERS[name].split()


def test_a_dense_call_is_one_of_attention() -> None:
    q, k, v = (torch.randn(2, 30, 4, 32) for _ in range(3))
    found = flash_attn_3.flash_attn_func(q, k, v, 0.2, True, window_size=(9, 0), attention_chunk=8, softcap=3.0)
    due = rt.attention(q, k, v, rt.CAUSAL & rt.Window(9) & rt.Chunk(8), scale=0.2, softcap=3.0)
    assert torch.equal(found, due)
    o, lse = flash_attn_3.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close((o, lse), rt.attention_with_lse(q, k, v), rtol=0, atol=0)


def test_a_packed_call_is_one_of_attention_packed() -> None:
    q, k, v = (torch.randn(11, 4, 32) for _ in range(3))
    cu = torch.tensor([0, 4, 11], dtype=torch.int32)
    found = flash_attn_3.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True, return_attn_probs=True)
    torch.testing.assert_close(found, rt.attention_packed_with_lse(q, k, v, cu, cu, rt.CAUSAL), rtol=0, atol=0)
    used = torch.tensor([3, 0])
    o, lse = flash_attn_3.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, used, causal=True, return_attn_probs=True)
    assert not o[3:].any()
    assert (lse[:, 3:] == -torch.inf).all()
    torch.testing.assert_close(o[:3], rt.attention(q[None, :3], k[None, :4], v[None, :4], rt.CAUSAL)[0])


def test_a_cache_is_appended_to_as_in_version_2() -> None:
    caches = [torch.zeros(2, 64, 2, 32) for _ in range(4)]
    q, k, v = torch.randn(2, 1, 4, 32), *(torch.randn(2, 1, 2, 32) for _ in range(2))
    found = flash_attn_3.flash_attn_with_kvcache(q, *caches[:2], k, v, cache_seqlens=10, causal=True, return_softmax_lse=True)
    due = flash_attn.flash_attn_with_kvcache(q, *caches[2:], k, v, cache_seqlens=10, causal=True, return_softmax_lse=True)
    torch.testing.assert_close(found, due, rtol=0, atol=0)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[0][:, 10], k[:, 0])


def test_packed_queries_read_pages() -> None:
    pages = torch.randn(2, 5, 16, 2, 32)
    table, lengths = torch.tensor([[4, 0], [2, 3]]), torch.tensor([20, 32])
    q, cu = torch.randn(7, 4, 32), torch.tensor([0, 3, 7], dtype=torch.int32)
    found = flash_attn_3.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=lengths, page_table=table, cu_seqlens_q=cu, causal=True, return_softmax_lse=True
    )
    cache = PagedKV(*pages, table.int(), lengths.int(), cu)
    torch.testing.assert_close(found, rt.attention_paged_with_lse(q, cache, rt.CAUSAL), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["qv", "q_descale", "k_descale", "v_descale"])
def test_what_is_missing_is_refused_by_name(name: str) -> None:
    q = torch.randn(1, 4, 2, 16)
    for call in (flash_attn_3.flash_attn_func, flash_attn_3.flash_attn_with_kvcache):
        with pytest.raises(rt.Unsupported, match=f"^{name} is .*; must be None: "):
            call(q, q, q, **{name: torch.ones(1)})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cu_seqlens_k_new": torch.zeros(1)}, "cu_seqlens_k_new is"),
        ({"rotary_seqlens": torch.zeros(1)}, "rotary_seqlens is"),
        ({"attention_chunk": 8}, "attention_chunk is 8"),
        ({"cu_seqlens_q": torch.zeros(2), "k": torch.zeros(1, 1, 2, 16)}, "cu_seqlens_q came with k"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_a_cache_does_not_take_is_refused(given: dict, words: str) -> None:
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(rt.Unsupported, match=words):
        flash_attn_3.flash_attn_with_kvcache(q, q, q, **given)


def test_packed_queries_need_pages_and_lengths() -> None:
    q, cu = torch.randn(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(rt.InvalidInput, match="packed queries need both"):
        flash_attn_3.flash_attn_with_kvcache(q, q[None], q[None], cu_seqlens_q=cu, cache_seqlens=torch.tensor([4]))
