"""Programs that score texts are answered: echo with logprobs, max_tokens 0, prompt_logprobs, with the values of the library."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pytest
import torch
import transformers

from rooftile.engine import LLM, SamplingParams
from tests.engine.folders import core, save
from tests.models.checkpoints import SMALL
from tests.server.live import Server

# the parameters of lm-evaluation-harness's `local-completions` for loglikelihood
HARNESS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
PROMPTS = [[5, 6, 7, 8, 9], [300, 5, 6], [70, 71], [9]]


def scores_as_the_harness_reads_them(answer: dict[str, Any], starts: list[int]) -> list[tuple[float, bool]]:
    """The sum of a continuation's logprobs, and whether greedy decoding writes it; the token behind it is left out."""
    found = []
    for choice, start in zip(sorted(answer["choices"], key=itemgetter("index")), starts, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][start:-1]
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        found.append((sum(logprobs), all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))))
    return found


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory):
    """A server and the library with a tokenizer that leaves out the first space of a text."""
    folder = tmp_path_factory.mktemp("sentencepiece") / "tiny"
    sizes = {"vocab_size": core("byte_fallback").get_vocab_size(), "max_position_embeddings": 2048, "initializer_range": 0.3}
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SMALL | sizes | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    save("byte_fallback", folder)
    with Server(folder) as made:
        yield made, LLM(folder, device="cpu", num_blocks=300)


def test_what_the_harness_sends_is_answered_with_the_librarys_logprobs(server, llm) -> None:
    answer = server.complete(PROMPTS, **HARNESS)
    due = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    for choice, output, prompt in zip(answer["choices"], due, PROMPTS, strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(prompt) + 1
        own = [top[token].logprob for token, top in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        assert logprobs["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-6)
    starts = [1, 2, 1, 1]
    sums = []
    for output, prompt, start in zip(due, PROMPTS, starts, strict=True):
        places = [(top[token], top) for token, top in zip(prompt[start:], output.prompt_logprobs[start:], strict=True)]
        sums.append((sum(own.logprob for own, _ in places), all(own.rank == 1 for own, _ in places)))
    found = scores_as_the_harness_reads_them(answer, starts)
    assert [one for one, _ in found] == pytest.approx([one for one, _ in sums], abs=1e-5)
    assert [one for _, one in found] == [one for _, one in sums]
    server.wait_until_idle()


def test_a_greedy_continuation_is_told_apart(server, llm) -> None:
    prompt = [5, 6, 7]
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    ids = output.outputs[0].token_ids
    answer = server.complete([prompt + ids, [*prompt, *ids[:3], (ids[3] + 1) % 300]], **HARNESS)
    assert [greedy for _, greedy in scores_as_the_harness_reads_them(answer, [3, 3])] == [True, False]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("prompt", ["The roof", [5, 6, 7], "Grüße 😀"])
def test_no_tokens_of_an_answer(server, llm, prompt, most, stream) -> None:
    """max_tokens 0 scores a prompt; others are answered behind it."""
    asked = {"prompt": prompt, "temperature": 0, "logprobs": 2, "echo": True, "max_tokens": most, "ignore_eos": True}
    if stream:
        *events, last = server.events(**asked, stream_options={"include_usage": True})
        choices = [event["choices"][0] for event in events]
        text = "".join(choice["text"] for choice in choices)
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        logprobs = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        end, usage = choices[-1]["finish_reason"], last["usage"]
    else:
        answer = server.complete(**asked)
        (choice,) = answer["choices"]
        text, logprobs, end, usage = choice["text"], choice["logprobs"], choice["finish_reason"], answer["usage"]
    params = SamplingParams(temperature=0, max_tokens=max(1, most), prompt_logprobs=2, logprobs=2, ignore_eos=True)
    (due,) = llm.generate([prompt], params)
    ids = due.prompt_token_ids
    answered = due.outputs[0].text if most else ""
    assert text == llm.tokenizer.decode([*ids, *due.outputs[0].token_ids[:most]])
    assert (end, usage["completion_tokens"], usage["prompt_tokens"]) == ("length", most, len(ids))
    assert text.endswith(answered)
    places = due.prompt_logprobs[1:] + due.outputs[0].logprobs[:most]
    own = [top[token].logprob for token, top in zip([*ids[1:], *due.outputs[0].token_ids], places, strict=False)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(own, abs=1e-6)
    assert len(logprobs["tokens"]) == len(ids) + most


def test_no_answer_and_no_echo(server) -> None:
    answer = server.complete(max_tokens=0, n=2, stop=["a"])
    said = [(choice["text"], choice["finish_reason"], choice["logprobs"]) for choice in answer["choices"]]
    assert said == [("", "length", None)] * 2
    assert answer["usage"]["completion_tokens"] == 0
    answer = server.post("/v1/completions", prompt="The roof", max_tokens=0, min_tokens=1)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
    # in a chat nothing is echoed
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=0)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def test_prompt_logprobs_are_the_librarys_in_vllms_form(server, llm) -> None:
    params = {"temperature": 0, "max_tokens": 2}
    (due,) = llm.generate(["The roof"], SamplingParams(**params, prompt_logprobs=3))
    (choice,) = server.complete(**params, prompt_logprobs=3)["choices"]
    assert choice["text"] == due.outputs[0].text
    for found, top in zip(choice["prompt_logprobs"], due.prompt_logprobs, strict=True):
        assert (found is None) == (top is None)
        for id, one in (top or {}).items():
            assert found[str(id)]["logprob"] == pytest.approx(one.logprob, abs=1e-6)
            assert (found[str(id)]["rank"], found[str(id)]["decoded_token"]) == (one.rank, one.decoded_token)
        assert len(found or {}) == len(top or {})
    messages = [{"role": "user", "content": "hi"}]
    chat = server.post("/v1/chat/completions", messages=messages, prompt_logprobs=0, **params).json()
    (due,) = llm.chat([messages], SamplingParams(**params, prompt_logprobs=0))
    assert [set(map(int, each)) for each in chat["prompt_logprobs"][1:]] == [set(each) for each in due.prompt_logprobs[1:]]


def test_prompt_logprobs_beside_an_echo(server) -> None:
    """Each form has as many of the most likely tokens as it was asked for."""
    (choice,) = server.complete(max_tokens=1, prompt_logprobs=4, logprobs=1, echo=True)["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} <= {1, 2}
    assert {len(top) for top in choice["prompt_logprobs"][1:]} <= {4, 5}
    own = [next(value["logprob"] for value in top.values()) for top in choice["prompt_logprobs"][1:]]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:-1]]
    assert best == own


def test_a_truncated_prompt_is_echoed_and_scored_as_it_was_read(server, llm) -> None:
    ids = llm.tokenizer.encode("The roof is tiled")
    (choice,) = server.complete("The roof is tiled", truncate_prompt_tokens=3, echo=True, logprobs=0, max_tokens=0)["choices"]
    assert choice["text"] == llm.tokenizer.decode(ids[-3:])
    assert len(choice["logprobs"]["tokens"]) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"prompt_logprobs": 20, "n": 16, "prompt": [[5] * 900] * 8}, "prompt_logprobs"),
        ({"logprobs": 20, "echo": True, "n": 16, "prompt": [[5] * 900] * 8}, "logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
    ],
)  # fmt: skip
def test_what_is_refused(server, fields, param) -> None:
    answer = server.post("/v1/completions", {"prompt": "The roof"} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_offsets_join_to_the_text(sentencepiece, stream, skip) -> None:
    """Each token's text keeps its space, and stands in the text where text_offset says."""
    server, llm = sentencepiece
    spelt = llm.tokenizer._core.token_to_id
    # words with their spaces, characters of several bytes, one that the prompt only begins, a special token
    words = [*map(spelt, ["▁the", "▁stop", "th", "▁▁", "▁", "a"]), *llm.tokenizer.encode("é日😀", special=False)[1:]]
    whole = llm.tokenizer.encode("the stop 日本")
    for prompt in (whole, whole[:-1], [*whole, spelt("<|user|>")], [spelt("<|begin|>")], [spelt("<|begin|>"), spelt("▁")]):
        asked = {
            "prompt": prompt, "logprobs": 1, "echo": True, "max_tokens": 12, "seed": len(prompt), "temperature": 1.5,
            "allowed_token_ids": [*words, spelt("<|user|>")], "ignore_eos": True, "skip_special_tokens": skip,
        }  # fmt: skip
        choices = [e["choices"][0] for e in server.events(**asked)] if stream else server.complete(**asked)["choices"]
        text = "".join(choice["text"] for choice in choices)
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        tokens = [token for part in parts for token in part["tokens"]]
        offsets = [offset for part in parts for offset in part["text_offset"]]
        assert len(tokens) == len(prompt) + 12
        assert offsets == sorted(offsets)
        for token, offset in zip(tokens, offsets, strict=True):
            hidden = skip and token in ("<|begin|>", "<|user|>")
            assert hidden or "\ufffd" in token or text.startswith(token, offset), (token, offset, text)
        visible = [token for token in tokens if not (skip and token in ("<|begin|>", "<|user|>"))]
        if not any("\ufffd" in token for token in visible):
            assert "".join(visible) == text


def test_the_text_of_a_continuation_over_http(sentencepiece) -> None:
    """However its tokens come: from the engine as text or as tokens, streamed or whole, echoed or not."""
    server, llm = sentencepiece
    id = llm.tokenizer._core.token_to_id("▁the")
    for more in ({}, {"logprobs": 0}, {"stop": ["zzz"]}, {"n": 2}, {"beam_width": 1}):
        for echo in (False, True):
            asked = {"prompt": "the stop", "max_tokens": 2, "temperature": 0, "allowed_token_ids": [id], "echo": echo} | more
            if "beam_width" in more:
                asked = asked | {"allowed_token_ids": None}
            due = "the stop" * echo + (
                llm.generate("the stop", SamplingParams(beam_width=1, max_tokens=2))[0].outputs[0].text
                if "beam_width" in more
                else " the the"
            )
            assert {choice["text"] for choice in server.complete(**asked)["choices"]} == {due}, more
            texts: dict[int, str] = {}
            for event in server.events(**asked):
                (choice,) = event["choices"]
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            assert set(texts.values()) == {due}, more
    (choice,) = server.complete("the stop", max_tokens=2, allowed_token_ids=[id], stop=[" the"])["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("", " the")
    special = llm.tokenizer._core.token_to_id("<|user|>")
    for include in (False, True):
        asked = {"allowed_token_ids": [special], "stop": ["<|user|>"], "include_stop_str_in_output": include}
        (choice,) = server.complete("the stop", max_tokens=2, **asked)["choices"]
        assert (choice["text"], choice["stop_reason"]) == ("<|user|>" * include, "<|user|>")
    messages = [{"role": "user", "content": "the"}]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=2, allowed_token_ids=[id], logprobs=True).json()
    (choice,) = chat["choices"]
    assert choice["message"]["content"] == " the the"
    assert [token["token"] for token in choice["logprobs"]["content"]] == [" the", " the"]
    assert bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"]).decode() == " the the"
