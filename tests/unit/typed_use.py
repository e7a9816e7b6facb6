"""A user's file with the types that it must get: `make check` runs mypy on it. It is never run."""

from typing import assert_type

from torch import Tensor

import rooftile as rt
from rooftile.engine import AsyncEngine, EngineConfig, RequestOutput
from rooftile.integrations import flash_attn, flash_attn_3
from rooftile.kvcache import PagedKV
from rooftile.numerics import QuantisedQKV
from rooftile.runtime.explanation import Explanation


def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, cache: PagedKV) -> None:
    mask = rt.CAUSAL & rt.Window(4) & rt.Prefix(2) & rt.Chunk(8)
    assert_type(mask, rt.Mask)
    assert_type(rt.attention(q, k, v, mask, softcap=30.0), Tensor)
    assert_type(rt.attention_with_lse(q, k, v), tuple[Tensor, Tensor])
    assert_type(rt.attention_packed(q, k, v, cu, cu), Tensor)
    assert_type(rt.attention_packed_with_lse(q, k, v, cu, cu), tuple[Tensor, Tensor])
    assert_type(rt.attention_paged(q, cache), Tensor)
    assert_type(rt.attention_paged_with_lse(q, cache), tuple[Tensor, Tensor])
    assert_type(rt.quantise_qkv(q, k, v), QuantisedQKV)
    assert_type(rt.attention_quantised(rt.quantise_qkv(q, k, v)), Tensor)
    assert_type(rt.merge([rt.attention_with_lse(q, k, v)]), tuple[Tensor, Tensor])
    assert_type(rt.explain(q, k, v, mask), Explanation)
    rt.attention(q, k, v, 3)  # type: ignore[arg-type]
    rt.attention(q, k, v, windw=4)  # type: ignore[call-arg]


def serve(folder: str) -> None:
    llm = rt.LLM(folder, max_model_len=100)
    assert_type(llm, rt.LLM)
    assert_type(llm.config, EngineConfig)
    assert_type(llm.generate("a", rt.SamplingParams(n=2)), list[RequestOutput])
    assert_type(AsyncEngine(llm), AsyncEngine)


def call_flash_attn(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> None:
    """A flag decides what flash-attn's functions return. So their type is both, and a user's file says which it asked for."""
    either = flash_attn.flash_attn_func(q, k, v, 0.0, None, True)
    assert_type(either, Tensor | tuple[Tensor, Tensor, Tensor | None])
    if isinstance(either, Tensor):
        assert_type(either, Tensor)
    else:
        assert_type(either, tuple[Tensor, Tensor, Tensor | None])
    assert_type(flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7), Tensor | tuple[Tensor, Tensor, Tensor | None])
    assert_type(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=3), Tensor | tuple[Tensor, Tensor])
    assert_type(flash_attn_3.flash_attn_func(q, k, v, None, True), Tensor | tuple[Tensor, Tensor])
    flash_attn.flash_attn_func(q, k, v, causl=True)  # type: ignore[call-arg]
    flash_attn.flash_attn_func(q, k, v, softmax_scale="1", return_attn_probs=True)  # type: ignore[arg-type]
