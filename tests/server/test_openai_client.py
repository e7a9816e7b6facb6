"""The official client works unchanged, and the texts are those of the library."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from rooftile.engine import SamplingParams

MESSAGES = [{"role": "user", "content": "Where is the tile?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def test_models(client, server) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_is_the_librarys(client, llm) -> None:
    (due,) = llm.generate("The roof", SamplingParams(**GREEDY))
    found = client.completions.create(model="tiny", prompt="The roof", **GREEDY)
    assert found.choices[0].text == due.outputs[0].text
    assert found.choices[0].finish_reason == due.outputs[0].finish_reason
    assert found.usage.prompt_tokens == len(due.prompt_token_ids)
    assert found.usage.completion_tokens == len(due.outputs[0].token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def test_a_chat_is_the_librarys(client, llm) -> None:
    (due,) = llm.chat(MESSAGES, SamplingParams(seed=3, max_tokens=20))
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=3, max_completion_tokens=20)
    assert found.choices[0].message.content == due.outputs[0].text
    assert found.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "top_p": 0.9, "seed": 5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0},
        {"n": 3, "seed": 1},
        {"logit_bias": {"70": 100}, "temperature": 0},
        {"stop": [" t", "a"], "seed": 2},
        {"extra_body": {"top_k": 4, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 4}},
        {"extra_body": {"beam_width": 3, "n": 2, "length_penalty": 0.5, "early_stopping": True}},
        {"extra_body": {"ignore_eos": True, "min_tokens": 12, "seed": 6, "skip_special_tokens": False}},
        {"extra_body": {"stop_token_ids": [97, 98, 99], "seed": 7, "include_stop_str_in_output": True}},
        {"extra_body": {"allowed_token_ids": [80, 81, 82], "bad_words": ["q"], "seed": 8, "truncate_prompt_tokens": 2}},
    ],
)
def test_each_parameter_means_the_same_as_in_the_library(client, llm, params) -> None:
    asked = {"max_tokens": 24} | params
    extra = asked.pop("extra_body", {})
    ours = asked | extra
    if "logit_bias" in ours:
        ours["logit_bias"] = {int(token): bias for token, bias in ours["logit_bias"].items()}
    (due,) = llm.generate("The roof is", SamplingParams(**ours))
    found = client.completions.create(model="tiny", prompt="The roof is", extra_body=extra, **asked)
    assert [choice.text for choice in found.choices] == [answer.text for answer in due.outputs]
    assert [choice.finish_reason for choice in found.choices] == [answer.finish_reason for answer in due.outputs]
    assert found.usage.completion_tokens == sum(len(answer.token_ids) for answer in due.outputs)


@pytest.mark.parametrize("stop", [None, "s", ["the stop", "oo", "\u00fc"]])
@pytest.mark.parametrize(("seed", "logprobs"), [(0, 1), (1, 1), (2, 1), (3, 1), (0, None), (1, None)])
def test_the_pieces_of_a_stream_join_to_the_whole(client, seed, logprobs, stop) -> None:
    asked = {"model": "tiny", "prompt": "Grüße", "max_tokens": 60, "seed": seed, "n": 2, "stop": stop, "logprobs": logprobs}
    whole = client.completions.create(**asked)
    texts, tokens, ends = ["", ""], [[], []], [None, None]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            assert ends[choice.index] is None, "an answer goes on after its end"
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.token_logprobs if logprobs else [] for choice in whole.choices]


def test_a_stream_of_a_chat(client) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 9, "max_tokens": 15, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 15
    assert all(chunk.usage is None for chunk in chunks[:-1])
    content = [token for c in chunks if c.choices and c.choices[0].logprobs for token in c.choices[0].logprobs.content]
    assert [(t.token, t.logprob) for t in content] == [(t.token, t.logprob) for t in whole.choices[0].logprobs.content]
    assert {len(token.top_logprobs) for token in content} == {3}


def test_an_answers_message_goes_back_in_the_next_turn(client) -> None:
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    said = client.chat.completions.create(**asked, messages=MESSAGES).choices[0].message
    found = [
        client.chat.completions.create(**asked, messages=[*MESSAGES, again, *MESSAGES[-1:]]).choices[0].message.content
        for again in ({"role": "assistant", "content": said.content}, said, said.model_dump())
    ]
    assert found[0] == found[1] == found[2]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "[]"}}]
    with pytest.raises(openai.BadRequestError, match=r"function.arguments is \[\]; must be a JSON object as text"):
        client.chat.completions.create(**asked, messages=[MESSAGES[0], said.model_dump() | {"tool_calls": calls}])


def test_logprobs_are_the_librarys(client, llm) -> None:
    (due,) = llm.generate("ab abc", SamplingParams(**GREEDY, logprobs=2))
    found = client.completions.create(model="tiny", prompt="ab abc", logprobs=2, **GREEDY).choices[0].logprobs
    for token, logprob, top, shown in zip(
        due.outputs[0].token_ids, found.token_logprobs, found.top_logprobs, due.outputs[0].logprobs, strict=True
    ):
        assert logprob == pytest.approx(shown[token].logprob)
        best = max(one.logprob for one in shown.values())
        assert max(top.values()) == pytest.approx(best)


def test_the_bytes_of_tokens_join_to_the_text(client, llm) -> None:
    """Also where a token is half of a character, which its text does not tell."""
    text = "\U0001f600\u00e9 \u65e5"
    assert any("\ufffd" in llm.tokenizer.text_of(token) for token in llm.tokenizer.encode(text))
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=40, seed=1,
        extra_body={"structured_outputs": {"choice": [text]}},
    ).choices[0]  # fmt: skip
    assert answer.message.content == text
    tokens = answer.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).startswith(text.encode())
    halves = [token for token in tokens if "\ufffd" in token.token]
    assert halves
    likely = [each for token in tokens for each in token.top_logprobs if "\ufffd" in each.token]
    assert all(b"\xef\xbf\xbd" not in bytes(each.bytes) for each in (*halves, *likely))


def test_prompts_of_each_kind(client, llm) -> None:
    texts = ["The roof", "a tile"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    due = [output.outputs[0].text for output in llm.generate(texts, SamplingParams(**GREEDY))]
    for prompt in (texts, ids):
        found = client.completions.create(model="tiny", prompt=prompt, **GREEDY)
        assert [choice.text for choice in found.choices] == due
        assert [choice.index for choice in found.choices] == [0, 1]
        assert found.usage.prompt_tokens == sum(map(len, ids))
    assert client.completions.create(model="tiny", prompt=ids[0], **GREEDY).choices[0].text == due[0]


def test_echo_puts_the_prompt_first(client) -> None:
    plain = client.completions.create(model="tiny", prompt="The roof", **GREEDY).choices[0].text
    echoed = client.completions.create(model="tiny", prompt="The roof", echo=True, **GREEDY).choices[0].text
    assert echoed == "The roof" + plain
    chunks = client.completions.create(model="tiny", prompt="The roof", echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed


def test_best_of_returns_the_most_likely(client, llm) -> None:
    (all_of_them,) = llm.generate("The roof", SamplingParams(n=6, seed=1, max_tokens=8, logprobs=0))
    best = max(all_of_them.outputs, key=lambda answer: answer.cumulative_logprob / len(answer.token_ids))
    found = client.completions.create(model="tiny", prompt="The roof", best_of=6, n=1, seed=1, max_tokens=8)
    assert [choice.text for choice in found.choices] == [best.text]
    assert found.choices[0].logprobs is None


def test_the_prefix_cache_is_counted(client) -> None:
    prompt = list(range(40, 104))
    for due in (0, 48):
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "counted"})
        assert found.usage.prompt_tokens_details.cached_tokens == due
    other = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "another"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_harmless_fields_change_nothing(client) -> None:
    plain = client.chat.completions.create(model="tiny", messages=MESSAGES, **GREEDY)
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, **GREEDY, user="me", metadata={"a": "b"}, store=False, service_tier="auto", tools=[],
    )  # fmt: skip
    assert found.choices[0].message.content == plain.choices[0].message.content


def test_errors_have_the_clients_classes(client, server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", n=17)
    assert bad.value.code == "invalid_value"
    assert bad.value.param == "n"
    assert "n is 17; must be a whole number from 1 to 16" in bad.value.message
    with pytest.raises(openai.NotFoundError) as lost:
        client.completions.create(model="gpt", prompt="x")
    assert lost.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 5000, stream=True)
    assert "5," in long.value.message


def test_64_at_once(server, llm) -> None:
    prompts = [f"The roof {n}" for n in range(64)]
    due = [output.outputs[0].text for output in llm.generate(prompts, SamplingParams(**GREEDY))]

    async def all_of_them() -> list[str]:
        limits = httpx.AsyncClient(limits=httpx.Limits(max_connections=64), timeout=300, trust_env=False)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=limits) as client:

            async def one(n: int) -> str:
                if n % 2:
                    return (await client.completions.create(model="tiny", prompt=prompts[n], **GREEDY)).choices[0].text
                text = ""
                async for chunk in await client.completions.create(model="tiny", prompt=prompts[n], stream=True, **GREEDY):
                    text += chunk.choices[0].text
                return text

            return list(await asyncio.gather(*map(one, range(64))))

    assert asyncio.run(asyncio.wait_for(all_of_them(), 300)) == due
    server.wait_until_idle()


class Roof(pydantic.BaseModel):
    """An answer of bounded length, so that any model completes it."""

    colour: Literal["red", "blue"]
    tiles: list[Literal[1, 2]] = pydantic.Field(max_length=2)
    slate: bool | None


@pytest.mark.parametrize("path", ["chat.completions", "beta.chat.completions"])
def test_parse_returns_the_pydantic_object(client, path) -> None:
    found = attrgetter(path)(client).parse(
        model="tiny", messages=MESSAGES, response_format=Roof, max_completion_tokens=300, seed=2
    )
    message = found.choices[0].message
    assert isinstance(message.parsed, Roof)
    assert message.parsed == Roof.model_validate_json(message.content)
    assert message.refusal is None


def test_a_stream_is_parsed_at_its_end(client) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "response_format": Roof, "max_completion_tokens": 300, "seed": 2}
    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        found = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(found, Roof)
    assert "content.done" in events
    assert found == client.chat.completions.parse(**asked).choices[0].message.parsed
