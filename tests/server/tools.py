"""Chat templates of models that call functions, functions to call, and a scripted server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server.scripted import ScriptedServer

# each writes the results of calls, so that a script can tell the turns of a loop apart
HERMES = (
    "{% if tools %}<|user|>system: <tools>{{ tools | tojson }}</tools> Write <tool_call>{\"name\": , \"arguments\": }</tool_call>"
    "<|end|>\n{% endif %}{% for message in messages %}<|user|>{{ message.role }}: {{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": "
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    "{% if message.tool_call_id %} [{{ message.tool_call_id | length }}]{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|user|>assistant: {% endif %}"
)  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "The weather of a city.",
        "parameters": {
            "type": "object", "required": ["city"], "additionalProperties": False,
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}  # fmt: skip
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object", "required": ["a", "b"], "additionalProperties": False,
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}  # fmt: skip


def hermes_call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def tools_server(folder: Path, place: Path, template: str = HERMES, *options: str) -> ScriptedServer:
    return ScriptedServer(folder, place, "--chat-template", template, *options)
