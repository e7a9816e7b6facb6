"""A chat template of a model that thinks, and a scripted server with it."""

from __future__ import annotations

from pathlib import Path

from tests.server.scripted import ScriptedServer

TEMPLATE = (
    "{% if tools %}<|user|>{{ tools | tojson }} Write <tool_call>{}</tool_call><|end|>\n{% endif %}"
    "{% for message in messages %}<|user|>{{ message['role'] }}: {{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opened %}<think>\n{% endif %}{% endif %}"
)


def thinking_server(folder: Path, place: Path, *options: str) -> ScriptedServer:
    """A server whose template has the switch enable_thinking; with opened the prompt begins the thought."""
    return ScriptedServer(folder, place, "--chat-template", TEMPLATE, *options)
