"""A reader of calls reads back what a published template writes for a call."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rooftile.engine.chat.parts import read_whole
from rooftile.engine.chat.tools.choose import choose_syntax
from rooftile.engine.chat.tools.use import read_use
from rooftile.engine.text.chat_template import render

FOLDER = os.environ.get("ROOFTILE_CHAT_TEMPLATES")
ARGUMENTS = {"city": 'K"i<el> é\n}', "days": 2}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "Ab3dE6gHi", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
TALK = [
    {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "Ab3dE6gHi", "name": "weather", "content": "7"},
]  # fmt: skip
DUE = {
    "Bielik-11B-v3.0-Instruct": "hermes", "MiMo-VL": "hermes", "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes", "Qwen-Qwen2.5-7B-Instruct": "hermes", "Qwen-Qwen3-0.6B": "hermes", "Reka-Edge": "hermes",
    "ibm-granite-granite-4.0": "hermes", "ibm-granite-granite-4.1": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json", "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "openai-gpt-oss-120b": "harmony",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json", "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral", "unsloth-mistral-Devstral-Small-2507": "mistral",
    # these write calls in ways of their own
    "GLM-4.6": None, "Qwen3-Coder": None, "unsloth-Apriel-1.5": None, "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": None,
    "google-gemma-2-2b-it": None,
}  # fmt: skip


@pytest.mark.skipif(FOLDER is None, reason="ROOFTILE_CHAT_TEMPLATES names no folder of published templates")
@pytest.mark.parametrize("name", DUE)
def test_published_templates(name: str) -> None:
    template = (Path(FOLDER or "") / f"{name}.jinja").read_text(encoding="utf-8")
    syntax, use = choose_syntax(template), read_use([WEATHER])
    assert (syntax and syntax.name) == DUE[name]
    if syntax is None or use is None:
        return
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    text = render(template, TALK, True, named, name, tools=[use.tools[0].given])
    said = text[text.rfind("QUESTION") + len("QUESTION") :]
    if syntax.name == "llama3_json":
        # a call without a mark is the whole answer
        said = said[said.find("{") :]
    (call,) = read_whole(syntax.reader(use.tools), said).calls
    assert (call.name, json.loads(call.arguments), call.broken) == ("weather", ARGUMENTS, None)


def test_no_text_beside_a_call_is_null_only_where_a_template_has_no_tools() -> None:
    """Published templates with tools search the text, and fail for null; older ones look for null to find a call."""
    with_tools = "{{ tools }}{% for message in messages %}{{ '</think>' in message.content }}{% endfor %}"
    assert render(with_tools, TALK, False, {}, "x").endswith("FalseFalseFalse")
    without = "{% for message in messages %}{{ message['content'] is none }} {% endfor %}"
    assert render(without, TALK, False, {}, "x") == "False True False "
