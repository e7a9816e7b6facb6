"""Chat templates get tools, calls, results and thoughts; the text is the text of Transformers.

The folder that ROOFTILE_CHAT_TEMPLATES names may have published templates, *.jinja, which are then compared, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rooftile.engine.text.chat_template import render
from rooftile.engine.text.harmony_messages import SIGN, harmony_messages
from rooftile.errors import InvalidInput
from tests.engine.folders import core
from tests.engine.test_chat_variables import NAMED, PLAIN, PUBLISHED
from tests.server.harmony import TEMPLATE as HARMONY
from tests.server.tools import ADD, HERMES, WEATHER

TOOLS = [
    {"type": "function", "function": {"description": "Adds."} | tool["function"]} for tool in (WEATHER, ADD)
]  # fmt: skip
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How warm?"}]


def call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id: str, name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "name": name, "content": content}


# templates take ids of nine letters and digits
ONE, OTHER = call("Ab3dE6gHi", "weather", city='K"i<el> é', days=2), call("Ab3dE6gHj", "add", a=1, b=2)
WARM, SUM = result("Ab3dE6gHi", "weather", "7"), result("Ab3dE6gHj", "add", "3")
CALLED = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [ONE]}, WARM]
TALKS = {
    "asked": ASKED,
    "called": CALLED,
    "two calls": [*ASKED, {"role": "assistant", "content": "", "tool_calls": [ONE, OTHER]}, WARM, SUM],
    "words and a call": [*ASKED, {"role": "assistant", "content": "I look.", "tool_calls": [ONE]}, WARM],
    "thought": [*ASKED, {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [ONE]}, WARM],
    "next turn": [*CALLED, {"role": "assistant", "content": "It is 7."}, {"role": "user", "content": "And now?"}],
    "system": [{"role": "system", "content": "Be brief."}, *CALLED],
}  # fmt: skip
SWITCHES: list[dict[str, Any]] = [{}, dict.fromkeys(("enable_thinking", "thinking"), True)]
SWITCHES.append(dict.fromkeys(SWITCHES[1], False))


def theirs(template: str, messages: list[dict[str, Any]], **variables: Any) -> str | None:
    """The text that Transformers writes; None if the template refuses the messages."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core("byte_level"), chat_template=template, **NAMED)
    given = harmony_messages(messages, {}).messages if SIGN in template else messages
    try:
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True, **variables)
    except Exception:
        return None
    assert isinstance(text, str)
    return text


def compare(template: str) -> int:
    """Compares a template's texts; returns how many of them are written."""
    written = 0
    for messages in TALKS.values():
        for variables in SWITCHES:
            due = theirs(template, messages, tools=TOOLS, **variables)
            if due is None or due == theirs(template, messages, **variables):
                # it refuses the messages, or Transformers leaves the tools out without a word
                with pytest.raises(InvalidInput, match="has no place for them" + "|cannot write these" * (due is None)):
                    render(template, messages, True, NAMED, "here", variables=variables, tools=TOOLS)
                continue
            found = render(template, messages, True, NAMED, "here", variables=variables, tools=TOOLS)
            assert found == due, (messages, variables)
            written += 1
    return written


@pytest.mark.parametrize(("template", "count"), [(HERMES, 21), (HARMONY, 21), (PLAIN, 0)], ids=["hermes", "harmony", "plain"])
def test_text_is_the_text_of_transformers(template: str, count: int) -> None:
    assert compare(template) == count


# these refuse all messages with these tools, or have no place for tools
REFUSE = {
    "CohereForAI-c4ai-command-r-plus-tool_use", "HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-ai-DeepSeek-V3.1", "fireworks-ai-llama-3-firefunction-v2",
    "google-gemma-2-2b-it", "llama-cpp-deepseek-r1", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
# these write questions alone, and these one call in a message
ASKS = {"Kimi-K2-Instruct", "Kimi-K2-Thinking", "meetkai-functionary-medium-v3.2"}
ONE_CALL = {"meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"}


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_templates(path: Path) -> None:
    name = path.stem
    due = 0 if name in REFUSE else 3 if name in ASKS else 18 if name in ONE_CALL else 21
    assert compare(path.read_text(encoding="utf-8")) == due


def test_gpt_oss_gets_one_call_in_a_message() -> None:
    """Each with its result behind it, and with a thought by the template's name; a text beside both is a part of the thought."""
    said = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [ONE, OTHER]}
    first, *rest = harmony_messages([*ASKED, said, SUM, WARM], {}).messages
    assert first == ASKED[0]
    plain = {"role": "assistant", "content": ""}
    assert rest == [
        plain | {"thinking": "Hm.\n\nI look.", "tool_calls": [ONE]}, WARM, plain | {"tool_calls": [OTHER]}, SUM,
    ]  # fmt: skip
    # results without an id that is known are taken in their order
    lost = [result("x", "", "1"), result("y", "", "2"), result("z", "", "3")]
    assert [each["content"] for each in harmony_messages([said, *lost], {}).messages if each["role"] == "tool"] == ["1", "2", "3"]
    # arguments as the wire has them, a text
    text = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("a", "add") | {"function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    assert harmony_messages([text], {}).messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert harmony_messages([{"role": "assistant", "content": "7", "tool_calls": []}], {}).messages == [
        {"role": "assistant", "content": "7"}
    ]


def test_gpt_oss_reads_the_operator_anywhere() -> None:
    """The template knows one message of the operator's, at the beginning; later ones stand where they are."""
    late = [{"role": "system", "content": "A"}, *ASKED, {"role": "developer", "content": "Be brief."}, *ASKED]
    text = render(HARMONY, late, True, NAMED, "here")
    begun, middle, rest = text.split("How warm?")
    assert begun.endswith("<|start|>developer<|message|>A<|end|><|start|>user<|message|>")
    assert middle == "<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>"
    assert rest == "<|end|><|start|>assistant"
