"""Words of other libraries get an answer: they are accepted, or one sentence says what to write."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import rooftile as rt
from rooftile import numerics
from rooftile.engine import LLM, AsyncEngine, EngineConfig
from rooftile.models import Decoder
from rooftile.runtime import foreign_words, words
from tests.integrations.test_flash_attn import SIGNATURES

Q = torch.randn(1, 4, 2, 16)
CU = torch.tensor([0, 4])
FLEX = inspect.signature(flex_attention).parameters
MODULE = inspect.signature(torch.nn.MultiheadAttention).parameters
FORWARD = inspect.signature(torch.nn.MultiheadAttention.forward).parameters


def names(text: str) -> set[str]:
    """Returns the names of arguments in a signature without types."""
    return set(re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", text.replace(", -1)", ")")))


# peer -> the words of its signatures
ATTENTION = {
    "flash-attn 2": names(",".join(SIGNATURES.values())),
    "flash-attn 3": names(
        "q, k, v, softmax_scale, causal, qv, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap, num_splits, "
        "pack_gqa, deterministic, sm_margin, return_attn_probs, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
        "seqused_q, seqused_k, page_table, leftpad_k, k_new, v_new, scheduler_metadata, learnable_sink"
    ),
    "SDPA": names("query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa"),
    "FlexAttention": set(FLEX),
    "xformers": names("query, key, value, attn_bias, p, scale, op, output_dtype"),
    "Transformers": names("query, key, value, attention_mask, scaling, sliding_window, softcap, s_aux"),
}


def assert_answered(call: Any, word: str, own: Any) -> None:
    """The word is an argument of ours, or InvalidInput names it and says what to write."""
    if word in own:
        return
    with pytest.raises(rt.InvalidInput, match=rf"has no argument {word}: \w+"):
        call(**{word: None})


@pytest.mark.parametrize("peer", ATTENTION)
def test_every_word_of_a_peer_has_an_answer(peer: str) -> None:
    assert len(ATTENTION[peer]) >= 8
    calls = {
        rt.attention: (Q, Q, Q), rt.attention_with_lse: (Q, Q, Q), rt.explain: (Q, Q, Q),
        rt.attention_packed: (Q[0], Q[0], Q[0], CU, CU), rt.attention_paged: (Q, None), rt.quantise_qkv: (Q, Q, Q),
        rt.attention_quantised: (None,),
    }  # fmt: skip
    for function, given in calls.items():
        own = inspect.signature(function).parameters
        for word in ATTENTION[peer]:
            assert_answered(lambda function=function, given=given, **kwargs: function(*given, **kwargs), word, own)


def test_sdpas_own_names_of_the_tensors() -> None:
    with pytest.raises(rt.InvalidInput, match="has no argument query: write q="):
        rt.attention(query=Q, key=Q, value=Q)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rt.optim.AdamW([torch.nn.Parameter(Q)], fused=True), "has no argument fused: leave it out: a step is"),
        (lambda: rt.optim.AdamW([torch.nn.Parameter(Q)], max_grad_norm=1.0), "no argument max_grad_norm: write clip_norm="),
        (lambda: rt.quantise_weight(Q[0, :, 0], "int4", group_size=16), "no argument group_size: write group="),
        (lambda: rt.fuse(torch.nn.Linear(2, 2), rope=True), "fuse has no argument rope: it has model, logits, verbose"),
    ],
)
def test_optimiser_weights_and_fusion_answer_too(call: Any, words: str) -> None:
    with pytest.raises(rt.InvalidInput, match=words):
        call()


def test_the_module_answers_too() -> None:
    layer = rt.nn.Attention(32, heads=2)
    for word in {*MODULE, "hidden_size", "num_key_value_heads", "is_causal"}:
        assert_answered(lambda **kwargs: rt.nn.Attention(32, 2, **kwargs), word, inspect.signature(rt.nn.Attention).parameters)
    for word in set(FORWARD) - {"self"}:
        assert_answered(lambda **kwargs: layer(torch.randn(1, 3, 32), **kwargs), word, ("x", "context", "key_padding_mask"))


def test_none_is_no_mask() -> None:
    due = rt.attention(Q, Q, Q)
    for found in (rt.attention(Q, Q, Q, None), rt.attention(Q, Q, Q, mask=None), rt.attention_with_lse(Q, Q, Q, None)[0]):
        assert torch.equal(found, due)
    assert torch.equal(rt.attention_packed(Q[0], Q[0], Q[0], CU, CU, None), rt.attention_packed(Q[0], Q[0], Q[0], CU, CU))
    assert rt.nn.Attention(32, 2, mask=None).mask == rt.FULL


def test_american_spellings_are_the_same() -> None:
    assert rt.quantize_qkv is rt.quantise_qkv
    assert rt.attention_quantized is rt.attention_quantised
    assert rt.attention_quantized_with_lse is rt.attention_quantised_with_lse
    assert numerics.quantize is numerics.quantise
    assert numerics.quantize_blocks is numerics.quantise_blocks
    with pytest.raises(AttributeError, match=r"module 'rooftile\.numerics' has no attribute 'quantized'"):
        _ = numerics.quantized


@pytest.mark.parametrize("name", sorted(foreign_words.NAMES))
def test_a_name_of_a_peer_is_answered(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'rooftile' has no attribute '{name}': "):
        getattr(rt, name)


@pytest.mark.parametrize("call", [lambda m: m | rt.FULL, lambda m: None | m, lambda m: m | 3, lambda m: ~m])
def test_masks_have_no_union_and_no_complement(call: Any) -> None:
    with pytest.raises(rt.InvalidInput, match="boolean bias="):
        call(rt.CAUSAL & rt.Window(3))


def test_errors_that_are_not_about_words_stay() -> None:
    with pytest.raises(rt.InvalidInput, match="attention has no argument colour: it has q, k, v, mask, alibi, "):
        rt.attention(Q, Q, Q, colour=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        rt.attention(Q, Q)

    @words.answers_foreign_words
    def fails(causal: bool = False) -> None:
        raise TypeError("from inside")

    with pytest.raises(TypeError, match="from inside"):
        fails(causal=True)


# imported by whoever needs them
MODULES = ("rooftile.integrations.flex_attention",)


def test_what_an_answer_tells_to_write_exists() -> None:
    for line in (*foreign_words.ARGUMENTS.values(), *foreign_words.NAMES.values()):
        for word in line.replace("(", " ").replace(")", " ").replace(",", " ").replace(";", " ").split():
            if word.startswith("rooftile."):
                owner = rt
                if word in MODULES:
                    importlib.import_module(word)
                for part in word.removeprefix("rooftile.").split("."):
                    owner = getattr(owner, part)
    assert ast.parse("from rooftile.integrations.flash_attn import flash_attn_func")


def test_a_compiled_call_with_the_wrapper_has_one_graph() -> None:
    compiled = torch.compile(lambda q: rt.attention(q, q, q, rt.CAUSAL), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(Q), rt.attention(Q, Q, Q, rt.CAUSAL))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rt.SamplingParams(max_token=3), "SamplingParams has no argument max_token: did you mean max_tokens?"),
        (lambda: rt.Window(3, rigth=1), "Window has no argument rigth: did you mean right?"),
        (lambda: rt.Window(size=3), "Window has no argument size: it has left, right"),
        # a word of other libraries, for an argument that is not there
        (lambda: rt.merge([], dropout_p=1), "merge has no argument dropout_p: it has parts"),
        (lambda: rt.qat.save(None, "x", format="int4"), "save has no argument format: it has model, folder, layout"),
        (lambda: LLM.generate(None, "x", max_tokens=3), "LLM.generate has no argument max_tokens: write SamplingParams(max"),
        (lambda: LLM.chat(None, [], documents=[]), "LLM.chat has no argument documents: write them into a message"),
        (lambda: LLM.stream(None, "x", lora_request=1), "LLM.stream has no argument lora_request: write adapter="),
        (lambda: AsyncEngine.complete(None, "x", stop="."), "AsyncEngine.complete has no argument stop: write Sampling"),
        (lambda: Decoder.random(None, sed=1), "Decoder.random has no argument sed: did you mean seed?"),
        (lambda: rt.integrations.enabled(backends="x"), "enabled has no argument backends: did you mean backend?"),
        (lambda: EngineConfig(max_num_seq=3), "EngineConfig has no argument max_num_seq: did you mean max_num_seqs?"),
    ],
)
def test_a_slip_of_the_pen_is_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(rt.InvalidInput) as raised:
        call()
    assert str(raised.value).startswith(sentence)


def test_compiled_programs_make_masks_and_merge() -> None:
    def program(q: torch.Tensor) -> torch.Tensor:
        near = rt.attention_with_lse(q, q, q, rt.CAUSAL & rt.Window(left=2))
        return rt.merge([near, rt.attention_with_lse(q, q, q)])[0]

    torch.testing.assert_close(torch.compile(program, backend="eager", fullgraph=True)(Q), program(Q))
