"""A folder of a model that writes harmony, with a small chat template of its forms, and a scripted server."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rooftile.engine.chat.harmony.header import MARKS
from tests.engine.folders import core
from tests.server.scripted import ScriptedServer

SPARE = 7
TEMPLATE = (
    "{% set last = namespace(name='') %}<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}"
    "{% for tool in tools or [] %} type {{ tool.function.name }} = any;{% endfor %}<|end|>{% for message in messages %}"
    "{% if message.role == 'developer' %}<|start|>developer<|message|>{{ message.content }}<|end|>"
    "{% elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% elif message.tool_calls %}{% set last.name = message.tool_calls[0].function.name %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}"
    "<|end|>{% endif %}<|start|>assistant to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>{{ message.role }}{% if message.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ message.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
AGAIN = "<|start|>assistant"


def thought(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|>{AGAIN}"


def call(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}"


def harmony_folder(folder: Path) -> Path:
    """Saves a tiny model whose tokenizer has the marks; its files name one of the tokens that end an answer."""
    tokens = core("byte_level")
    tokens.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    torch.manual_seed(0)
    end = tokens.token_to_id("<|return|>")
    config = transformers.GptOssConfig(
        vocab_size=tokens.get_vocab_size() + SPARE, hidden_size=48, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=128,
        max_position_embeddings=8192, initializer_range=0.2, bos_token_id=None, eos_token_id=end, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|return|>", chat_template=TEMPLATE)
    made.save_pretrained(folder)
    return folder


def harmony_server(folder: Path, place: Path, *options: str) -> ScriptedServer:
    return ScriptedServer(folder, place, *options)
