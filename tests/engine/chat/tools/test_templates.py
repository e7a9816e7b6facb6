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
ARGUMENTS = {"city": 'K"i<el> é\n}', "days": 2, "exact": True, "places": [1, {"a": "b"}], "year": "1999"}
PROPERTIES = {"city": "string", "days": "integer", "exact": "boolean", "places": "array", "year": "string"}
PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in PROPERTIES.items()}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
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
    "fireworks-ai-llama-3-firefunction-v2": "phi4_mini_json", "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "llama-cpp-deepseek-r1": "deepseek_v3",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder", "Qwen3-Coder": "qwen3_coder", "Qwen3.5-4B": "qwen3_coder",
    "StepFun3.5-Flash": "qwen3_coder", "LFM2.5-8B-A1B": "pythonic", "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45", "inclusionai-ling-3.0-flash": "glm45", "poolside-Laguna-XS.2": "glm45", "Spark2.5": "glm45",
    "Kimi-K2-Instruct": "kimi_k2", "Kimi-K2-Thinking": "kimi_k2", "moonshotai-Kimi-K2": "kimi_k2", "MiniMax-M2": "minimax_m2",
    "MiniMax-M1": "minimax", "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere_command3", "Cohere2MoE": "cohere_command3",
    "google-gemma-4-31B-it": "gemma4", "google-gemma-4-31B-it-interleaved": "gemma4",
    # these write calls in ways of their own
    "Kimi-K3": None, "MiniMax-M3": None, "CohereForAI-c4ai-command-r-plus-tool_use": None,
    "deepseek-ai-DeepSeek-V3.2": None, "tencent-Hy3": None, "muse-glimmer": None,
    "unsloth-Apriel-1.5": None,
    "google-gemma-2-2b-it": None,
}  # fmt: skip

# these have no place for tools, or one that only llama.cpp fills
WITHOUT_TOOLS = (
    "fireworks-ai-llama-3-firefunction-v2", "deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "llama-cpp-deepseek-r1",
)  # fmt: skip
# these leave the calls of messages out, or change a list to write them, which no sandbox lets them
WITHOUT_CALLS = ("ibm-granite-granite-3.3-2B-Instruct", "Kimi-K2-Instruct", "Kimi-K2-Thinking")


@pytest.mark.skipif(FOLDER is None, reason="ROOFTILE_CHAT_TEMPLATES names no folder of published templates")
@pytest.mark.parametrize("name", DUE)
def test_published_templates(name: str) -> None:
    template = (Path(FOLDER or "") / f"{name}.jinja").read_text(encoding="utf-8")
    syntax, use = choose_syntax(template), read_use([WEATHER])
    assert (syntax and syntax.name) == DUE[name]
    if syntax is None or use is None or name in WITHOUT_CALLS:
        return
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    variables = {"functions": "[]", "datetime": "now"} if "firefunction" in name else {}
    given = None if name in WITHOUT_TOOLS else [use.tools[0].given]
    text = render(template, TALK, True, named, name, tools=given, variables=variables)
    said = text[text.rfind("QUESTION") + len("QUESTION") :]
    if syntax.name == "llama3_json":
        # a call without a mark is the whole answer
        said = said[said.find("{") :]
    (call,) = read_whole(syntax.reader(use.tools), said).calls
    assert (call.name, json.loads(call.arguments), call.broken) == ("weather", ARGUMENTS, None)


def test_tools_have_the_name_that_a_template_reads() -> None:
    """SmolLM3's has xml_tools, which are functions without a type beside them."""
    template = '{% for tool in xml_tools %}{{ tool.name }} {% endfor %}<tool_call>\n{"name": ... </tool_call>'
    assert render(template, TALK[:1], True, {}, "x", tools=[WEATHER]).startswith("weather ")
    assert render(template, TALK[:1], True, {}, "x", variables={"xml_tools": [{"name": "own"}]}).startswith("own ")
    syntax = choose_syntax(template)
    assert syntax is not None
    assert syntax.name == "hermes"


def test_no_text_beside_a_call_is_null_only_where_a_template_has_no_tools() -> None:
    """Published templates with tools search the text, and fail for null; older ones look for null to find a call."""
    with_tools = "{{ tools }}{% for message in messages %}{{ '</think>' in message.content }}{% endfor %}"
    assert render(with_tools, TALK, False, {}, "x").endswith("FalseFalseFalse")
    without = "{% for message in messages %}{{ message['content'] is none }} {% endfor %}"
    assert render(without, TALK, False, {}, "x") == "False True False "
