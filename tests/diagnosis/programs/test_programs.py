"""The programs of the table of diagnoses run with each Transformers: one says `cache` for another's `past_key_values`."""

from __future__ import annotations

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from rooftile_lab.bench.diagnosis import programs  # noqa: E402


def test_each_step_decodes_a_token_after_the_same_context(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = transformers.LlamaForCausalLM.forward
    found: list[tuple[int, int]] = []

    @functools.wraps(forward)
    def seen(self, **words):
        held = next((words[word] for word in ("cache", "past_key_values") if words.get(word) is not None), None)
        found.append((words["input_ids"].shape[1], 0 if held is None else held.get_seq_length()))
        return forward(self, **words)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", seen)
    with programs.llama_decoding_1(torch.device("cpu")) as step:
        step()
        step()
    assert found == [(256, 0), (1, 256), (1, 256)]
