"""The forms of a request, and the errors for invalid ones."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput, Unsupported
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts
from tests.engine.folders import save
from tests.models.checkpoints import SMALL, VOCABULARY, saved


class Broken(list):
    """A list that cannot be read."""

    def __iter__(self) -> Any:
        raise ZeroDivisionError("no token")


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], GREEDY, "the prompt has no token"),
        ([3, VOCABULARY], GREEDY, f"the prompt has {VOCABULARY} for a token; the model has 0 to {VOCABULARY - 1}"),
        ([3, -1], GREEDY, "the prompt has -1 for a token"),
        ([3, "x"], GREEDY, "the prompt has 'x' for a token"),
        ([1] * 96, GREEDY, "the prompt has 96 tokens, and a sequence at most 96, one of them for the answer"),
        ([1], SamplingParams(beam_width=9), "9 beams at once are asked for; at most 8 run here"),
        ([1], SamplingParams(stop_token_ids=[VOCABULARY]), f"stop_token_ids names token {VOCABULARY}"),
        ([1] * 60, SamplingParams(beam_width=8, max_tokens=36), "60 tokens of prompt and 8 x 36 of beams take 27 blocks"),
        ("text", GREEDY, "the prompt is text and the model has no tokenizer"),
        (None, GREEDY, "the prompt is 'None', of type NoneType; must be a list of token ids"),
        (5.0, GREEDY, "the prompt is '5.0', of type float; must be a list of token ids"),
        (b"text", GREEDY, "the prompt is \"b'text'\", of type bytes; must be a list of token ids"),
        ([[1]], GREEDY, "the prompt has [1] for a token"),
        ([True], GREEDY, "the prompt has True for a token"),
        (Broken(), GREEDY, "the prompt cannot be read: its iteration raised ZeroDivisionError: no token"),
        ({"prompt_token_ids": [1], "images": []}, GREEDY, "the prompt has 'prompt_token_ids', 'images'; must have 'prompt' or"),
        ({"cache_salt": "a"}, GREEDY, "the prompt has 'cache_salt'; must have 'prompt' or 'prompt_token_ids'"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, GREEDY, "the salt is 5; must be a string"),
        ([1], {"n": 1}, "the sampling parameters are {'n': 1}; must be SamplingParams"),
    ],
)
def test_a_bad_request_fails_alone(prompt, params: SamplingParams, sentence: str, peers) -> None:
    peer = peers("llama")
    llm = LLM(peer.folder, max_model_len=96, num_blocks=20, max_num_seqs=8)
    good = prompts(3)
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate([good[0], prompt, good[1]], [few, params, few])
    assert [output.outputs[0].token_ids for output in (outputs[0], outputs[2])] == peer.greedy(good[:2], 3)
    assert outputs[1].error is not None
    assert outputs[1].error.startswith(sentence)
    assert outputs[1].outputs == []
    assert_clean(llm)


@pytest.mark.parametrize(
    ("asked", "params", "sentence"),
    [
        (5, None, "prompts is 5; must be a text, a list of token ids, or a list of such prompts"),
        (None, None, "prompts is None; must be a text"),
        ([[1]], 5, "sampling_params is 5; must be SamplingParams, or a list of them"),
        ([[1]], {"n": 1}, "sampling_params is {'n': 1}; must be SamplingParams"),
        ([[1]], [], "there are 0 sampling_params for 1 prompts"),
    ],
)
def test_what_is_no_list_of_prompts(asked, params, sentence: str, peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    for call in (llm.generate, lambda *given: list(llm.stream(*given))):
        with pytest.raises(InvalidInput) as raised:
            call(asked, params)
        assert str(raised.value).startswith(sentence)
    assert_clean(llm)


def test_prompts_in_arrays_and_dictionaries(peers) -> None:
    peer = peers("llama")
    llm = LLM(peer.folder, **ROOM)
    (prompt,) = prompts(1)
    due = peer.greedy([prompt], TOKENS)
    for asked in (np.array(prompt), torch.tensor(prompt), tuple(prompt), {"prompt_token_ids": prompt}, iter(prompt)):
        (output,) = llm.generate(asked, GREEDY)
        assert (output.prompt_token_ids, [answer.token_ids for answer in output.outputs]) == (prompt, due)
        assert {type(token) for token in output.prompt_token_ids} == {int}
    several = [list(np.array(prompt)), torch.tensor(prompt), {"prompt_token_ids": np.array(prompt), "cache_salt": None}]
    assert [output.outputs[0].token_ids for output in llm.generate(several, GREEDY)] == due * 3


def test_prefixes_are_shared_under_one_salt_only(peers) -> None:
    llm = LLM(peers("llama").folder, **ROOM)
    one = SamplingParams(temperature=0, max_tokens=1)
    prompt = [n % VOCABULARY for n in range(60)]
    read = []
    for salt in ("a", "b", "a", None, None):
        before = llm.engine.steps["tokens"]
        llm.generate([{"prompt_token_ids": prompt, "cache_salt": salt}], one)
        read.append(llm.engine.steps["tokens"] - before)
    assert read == [60, 60, 12, 60, 12]


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"tensor_parallel_size": 0}, InvalidInput, "tensor_parallel_size is 0; must be a whole number of at least 1"),
        ({"kv_dtype": "fp4"}, Unsupported, "kv_dtype is 'fp4'; has"),
        ({"allocator": "buddy"}, InvalidInput, "allocator is 'buddy'"),
        ({"block_size": 12}, InvalidInput, "block_size is 12; must be a power of two of at least 8"),
        ({"max_model_len": 1000}, InvalidInput, "max_model_len is 1,000; the model has positions for 2 to 128"),
        ({"max_model_len": 96, "num_blocks": 5}, InvalidInput, "5 blocks of 16 are room for 80 tokens; a sequence may have 96"),
        ({"max_batched_tokens": 0}, InvalidInput, "max_batched_tokens is 0; must be a whole number of at least 1"),
        ({"num_blocks": -1}, InvalidInput, "num_blocks is -1; must be a whole number of at least 1"),
        ({"device": "xpu"}, InvalidInput, "device is 'xpu'; must be cpu, cuda or cuda:N"),
        ({"device": torch.device("xpu")}, Unsupported, 'device is \'xpu\'; has "cuda" and "cpu"'),
        ({"gpu_memory_utilization": 1.5}, InvalidInput, "gpu_memory_utilization is 1.5"),
    ],
)
def test_what_an_engine_cannot_be(settings: dict[str, Any], error: type[Exception], sentence: str, peers) -> None:
    with pytest.raises(error) as raised:
        LLM(peers("llama").folder, **settings)
    assert str(raised.value).startswith(sentence)


def test_positions_beyond_the_longest_sequence_take_no_memory(peers, tmp_path) -> None:
    folder = shutil.copytree(peers("llama").folder, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 1 << 24}
    (folder / "config.json").write_text(json.dumps(settings))
    for given in ({"max_model_len": 80}, {"num_blocks": 5}):
        llm = LLM(folder, **given)
        assert (llm.engine.max_len, len(llm.engine.runner.decoder.rotary)) == (80, 80)


def test_a_decoder_is_what_it_is(peers) -> None:
    """An LLM does not ignore a dtype and device given with a decoder."""
    decoder = LLM(peers("llama").folder, **ROOM).engine.runner.decoder
    assert LLM(decoder, dtype=torch.float32, device="cpu", **ROOM).engine.runner.decoder is decoder
    with pytest.raises(InvalidInput, match=r"dtype is torch.bfloat16 and the decoder's torch.float32; make it with that dtype"):
        LLM(decoder, dtype=torch.bfloat16, **ROOM)
    with pytest.raises(InvalidInput, match=r"device is meta and the decoder is on cpu; make it there"):
        LLM(decoder, device=torch.device("meta"), **ROOM)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_blocks": 40.0}, "num_blocks is 40.0; must be a whole number of at least 1"),
        ({"max_batched_tokens": "8"}, "max_batched_tokens is '8'; must be a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True; must be a whole number of at least 1"),
        ({"block_size": 16.0}, "block_size is 16.0; must be a power of two of at least 8"),
        ({"max_model_len": 64.5}, "max_model_len is 64.5; must be a whole number"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization is '0.9'; must be above 0 and at most 1"),
        ({"num_blocks": 10**14}, "no memory for a cache: 100,000,000,000,000 blocks (num_blocks) of 7,680 bytes take 768,"),
        ({"max_num_seqs": 10**9}, "max_num_seqs is 1,000,000,000; may be at most 65,536"),
        ({"device": "gpu"}, "device is 'gpu'; must be cpu, cuda or cuda:N"),
    ],
)
def test_settings_of_the_wrong_kind(settings: dict[str, Any], sentence: str, peers) -> None:
    with pytest.raises(InvalidInput) as raised:
        LLM(peers("llama").folder, **settings)
    assert str(raised.value).startswith(sentence)


def test_texts_and_stop_strings(tmp_path) -> None:
    """Text prompts: a stop is found one step late, and the text and tokens after it are dropped."""
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420})
    saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    save("byte_level", tmp_path)
    for ahead in (False, True):
        llm = LLM(tmp_path, **ROOM)
        llm.engine._ahead = ahead
        assert llm.tokenizer is not None
        whole = llm.generate("cat", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0))[0]
        (answer,) = whole.outputs
        assert whole.prompt == "cat"
        assert whole.prompt_token_ids == llm.tokenizer.encode("cat")
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        middle = answer.text[5:8]
        assert len(middle) == 3
        at = answer.text.index(middle)
        for include in (False, True):
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0, stop=middle, include_stop=include)
            (cut,) = llm.generate("cat", params)[0].outputs
            assert cut.text == answer.text[: at + 3 * include]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", middle)
            assert cut.token_ids == answer.token_ids[: len(cut.token_ids)]
            assert len(llm.tokenizer.decode(cut.token_ids)) >= len(cut.text)
            assert cut.logprobs is not None
            assert len(cut.logprobs) == len(cut.token_ids) < 30
            assert cut.cumulative_logprob == pytest.approx(
                sum(told[token].logprob for told, token in zip(cut.logprobs, cut.token_ids, strict=True))
            )
        beams = SamplingParams(beam_width=2, max_tokens=5, ignore_eos=True)
        (best,) = llm.generate(["cat"], beams)[0].outputs
        assert best.text == llm.tokenizer.decode(best.token_ids)
        assert_clean(llm)
