"""Calls in the words of mamba-ssm, causal-conv1d and fla get the line to write, which names an argument that is there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import rooftile as rt
from rooftile import recurrent as rec
from rooftile.errors import InvalidInput
from rooftile.recurrent import words

CALLS = {
    **dict.fromkeys(
        (rec.ssd, rec.ssd_step, rec.selective_scan, rec.selective_scan_step, rec.gated_delta, rec.gated_delta_step), words.CALL
    ),
    **dict.fromkeys((rec.causal_conv, rec.conv_step), words.CONVOLUTION),
    **dict.fromkeys((rt.nn.Mamba, rt.nn.Mamba2, rt.nn.GatedDeltaNet), words.LAYER),
    rt.nn.Mamba2(32, head_dim=16).forward: words.LAYER_CALL,
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_each_word_is_answered_with_an_argument_that_is_there(call: Callable[..., Any]) -> None:
    own = inspect.signature(call).parameters
    for word in CALLS[call].keys() - own.keys():
        with pytest.raises(InvalidInput, match=rf"has no argument {word}: ") as error:
            call(**{word: 1})
        due = re.search(r": write (\w+)=", str(error.value))
        assert due is None or due[1] in own, error.value


@pytest.mark.parametrize(
    ("call", "word", "sentence"),
    [
        (rec.gated_delta, "output_final_state", "write return_state=; it is True by default, and the call returns"),
        (rec.gated_delta, "use_qk_l2norm_in_kernel", "write qk_norm="),
        (rec.gated_delta, "cu_seqlens", r"write cu=, int32 offsets \(B \+ 1,\)"),
        (rec.gated_delta, "initial_state", "write state="),
        (rec.gated_delta_step, "output_final_state", "it has state, q, k, v, g, beta, scale, qk_norm, slots"),
        (rec.ssd, "seq_idx", "write cu="),
        (rec.ssd, "chunk_size", "leave it out: it changes no result"),
        (rec.selective_scan, "delta_softplus", "write softplus="),
        (rec.causal_conv, "initial_states", "write tail=, oldest input first"),
        (rt.nn.Mamba2, "d_state", "write state_size="),
        (rt.nn.Mamba2, "dt_min", "rooftile.integrations.mamba_ssm has it"),
        (rt.nn.Mamba, "headdim", "it has dim, expand"),
        (rt.nn.GatedDeltaNet, "num_v_heads", "write value_heads="),
        (rt.nn.Mamba(32).forward, "inference_params", "write y, state = layer.with_state"),
    ],
)
def test_an_answer(call: Callable[..., Any], word: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=f"has no argument {word}: {sentence}"):
        call(**{word: None})
