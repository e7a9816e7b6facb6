"""Reads the messages of a chat.

Clients send messages back with fields of their own, or of other servers. Fields that do not change the text
that the model reads are left out; fields that would change it, and are not supported, are refused.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from rooftile.engine.text.chat_template import text_of
from rooftile.errors import InvalidInput, Unsupported
from rooftile.server import limits
from rooftile.server.http.openai.fields import read_form
from rooftile.server.http.openai.forms import Message
from rooftile.server.http.openai.tools import read_calls, read_id
from rooftile.server.refusals import Refusal

_TEXT = "messages are text"
_CONTINUE = "set continue_final_message to true beside messages, and the last message is continued"
# fields that change the text that a model reads, and why they are not supported. Clients send empty ones back with an answer
CHANGING = {
    "audio": _TEXT, "documents": _TEXT, "files": _TEXT, "function_call": "write tool_calls", "image": _TEXT, "images": _TEXT,
    "partial": _CONTINUE, "prefix": _CONTINUE, "refusal": _TEXT, "tools": "write tools beside messages",
    "videos": _TEXT,
}  # fmt: skip
_EMPTY: tuple[Any, ...] = (None, [], {}, "", False)
# what a model has thought, by the names of templates: each reads one of them, if any
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# a name that is nearer than this to one of ours is a slip of the pen
NEAR = 0.85


def read_messages(given: Any) -> list[dict[str, Any]]:
    """Returns the messages of a chat as templates take them: with a role, and a text as content.

    Raises:
        Refusal: they are no such list, or hold more than text.
    """
    if isinstance(given, list) and len(given) > limits.MESSAGES:
        raise _bad("messages", f"messages has {len(given):,} messages; may have at most {limits.MESSAGES:,}")
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise _bad("messages", "messages must be a list of at least one object with a role and content")
    return [_read(each, f"messages[{place}]") for place, each in enumerate(given)]


def _read(given: dict[str, Any], where: str) -> dict[str, Any]:
    message = read_form(Message, _known(given, where), where)
    if len(message.role) > limits.NAME_CHARACTERS:
        raise _bad(where, f"{where}.role has more than {limits.NAME_CHARACTERS} characters")
    if message.content is None and message.role != "assistant":
        due = "must be a text, or a list of parts of type text"
        raise _bad(f"{where}.content", f"{where}.content is {'null' if 'content' in given else 'missing'}; {due}")
    try:
        found: dict[str, Any] = {"role": message.role, "content": text_of(message.content, f"{where}.content")}
    except (InvalidInput, Unsupported) as error:
        code = "unsupported" if isinstance(error, Unsupported) else "invalid_value"
        raise Refusal(code, str(error), param=f"{where}.content") from None
    if message.tool_calls and message.role != "assistant":
        raise _bad(
            f"{where}.tool_calls", f"{where} is of the role {message.role[:40]!r} and has tool_calls; the assistant's have"
        )
    if message.role == "tool":
        found["tool_call_id"] = read_id(message.tool_call_id, f"{where}.tool_call_id")
    if message.tool_calls:
        found["tool_calls"] = read_calls(message.tool_calls, f"{where}.tool_calls")
        # beside calls no text is null (see `render`)
        found["content"] = found["content"] or None
    if message.name is not None:
        found["name"] = message.name
    thought = message.reasoning_content or message.reasoning
    return found if thought is None else found | dict.fromkeys(THOUGHTS, thought)


def _known(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields of a message that are read; refuses fields that would change its meaning."""
    own = Message.model_fields
    for name, value in message.items():
        if name in CHANGING and not any(value == one and type(value) is type(one) for one in _EMPTY):
            raise Refusal("unsupported", f"{where}.{name} is not supported: {CHANGING[name]}", param=f"{where}.{name}")
    unknown = [name for name in message if name not in own and name not in CHANGING]
    # number of messages that are compared: each takes time
    near = {name: get_close_matches(name[:80], own, n=1, cutoff=NEAR) for name in unknown[:20]}
    slip = next((name for name, found in near.items() if found), None)
    if slip is not None:
        why = f"{slip[:80]!r} is no field of {where}; did you mean {near[slip][0]}?"
        raise Refusal("unknown_field", why, param=f"{where}.{slip[:80]}")
    return {name: value for name, value in message.items() if name in own}


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
