"""Messages of a conversation as the chat template of gpt-oss takes them.

The template writes one call per message, with the result behind it, and thoughts by the name `thinking`. It leaves further calls,
later messages of the operator and thoughts by other names out without a word, so conversations are put into its form first. Which
thoughts the model reads is the template's to say: those before a call, up to the next final answer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rooftile.errors import InvalidInput

SIGN = "<|channel|>analysis<|message|>"
"""A text that is in the template."""
EFFORTS = ("low", "medium", "high")
# several servers name a model's thoughts differently
_THOUGHTS = ("thinking", "reasoning_content", "reasoning")
_OPERATORS = ("system", "developer")
# how the template begins a message of the user's, and the operator's
_USER, _DEVELOPER = "<|start|>user<|message|>", "<|start|>developer<|message|># Instructions\n\n"


class HarmonyMessages(NamedTuple):
    """A conversation in the template's form.

    Args:
        messages: the messages.
        late: the operator's texts behind the first turn, each by a mark that stands for it in a message of the user.
    """

    messages: list[dict[str, Any]]
    late: dict[str, str]

    def put_back(self, written: str) -> str:
        """Returns a conversation as the template has written it, with the operator's messages in the place of their marks."""
        for mark, text in self.late.items():
            written = written.replace(f"{_USER}{mark}", f"{_DEVELOPER}{text}\n\n", 1)
        return written


def harmony_messages(messages: Sequence[dict[str, Any]], variables: Mapping[str, Any]) -> HarmonyMessages:
    """Returns a conversation in the template's form.

    Args:
        messages: the messages, whose contents are texts.
        variables: the caller's variables of the template.

    Raises:
        InvalidInput: the model does not know the effort, or calls or thoughts are not in OpenAI's form.
    """
    effort = variables.get("reasoning_effort", "medium")
    if effort not in EFFORTS:
        raise InvalidInput(f"reasoning_effort is {repr(effort)[:40]}; this model has {', '.join(EFFORTS)}")
    first = next((n for n, each in enumerate(messages) if each["role"] not in _OPERATORS), len(messages))
    found = [{"role": "developer", "content": "\n\n".join(each["content"] for each in messages[:first])}] if first else []
    place, late = first, dict[str, str]()
    while place < len(messages):
        message = messages[place]
        end = place + 1
        while message.get("tool_calls") and end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        if message["role"] in _OPERATORS:
            mark = secrets.token_hex(16)
            late[mark] = message["content"]
            found.append({"role": "user", "content": mark})
        else:
            found += _turn(message, messages[place + 1 : end])
        place = end
    return HarmonyMessages(found, late)


def _turn(message: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a message with the results of its calls: one message for each call."""
    thought = next((message[name] for name in _THOUGHTS if message.get(name)), "")
    plain = {name: value for name, value in message.items() if name not in (*_THOUGHTS, "tool_calls")}
    calls = message.get("tool_calls")
    if not isinstance(thought, str):
        raise InvalidInput(f"a message's thoughts are {repr(thought)[:80]}; must be a text")
    if calls and not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
        raise InvalidInput(f"a message has tool_calls {repr(calls)[:80]}; must be a list of objects with a function")
    if not calls:
        return [plain | ({"thinking": thought} if thought else {})]
    # the template takes one of the two beside a call, and writes both as a thought
    said = "\n\n".join(filter(None, (thought, plain.get("content") or "")))
    found = []
    for n, (call, own) in enumerate(zip(calls, _shared(calls, results), strict=True)):
        found.append(plain | {"content": "", "tool_calls": [_with_object(call)]} | ({"thinking": said} if said and not n else {}))
        found += own
    return found


def _is_call(call: object) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function", call), dict)


def _shared(calls: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns the results of each call: those with its id, and others in their order."""
    ids = [call.get("id") for call in calls]
    shares = [[each for each in results if id is not None and each.get("tool_call_id") == id] for id in ids]
    for each in results:
        if each.get("tool_call_id") not in ids:
            empty = next((share for share in shares if not share), shares[-1])
            empty.append(each)
    return shares


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a call whose arguments are an object: the template would write a text with its quotes."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
