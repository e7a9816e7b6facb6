"""One call of /v1/messages: from its body to a chat, and from the chat's answer to a message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from rooftile.runtime.words import rename
from rooftile.server.engine.messages import Ready
from rooftile.server.http.anthropic.blocks import messages_of
from rooftile.server.http.anthropic.errors import anthropic_body
from rooftile.server.http.anthropic.forms import CountForm, MessagesForm, OutputForm, ThinkingForm
from rooftile.server.http.anthropic.output import Output
from rooftile.server.http.openai.fields import read_form, read_part
from rooftile.server.http.openai.forms import ChatForm
from rooftile.server.http.openai.generation import GenerationRequest, chat_request, check_params
from rooftile.server.http.sse import Chunks, end_of, event
from rooftile.server.observe.log import AccessRecord
from rooftile.server.refusals import Refusal

# a chat's fields by the names that a client of this route has sent
_NAMES = {"response_format": "output_config.format", "reasoning_effort": "output_config.effort", "stop": "stop_sequences"}
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# the one edit of a conversation that keeps all of it
_KEEPS = {"type": "clear_thinking_20251015", "keep": "all"}


class MessagesCall:
    """One call.

    Args:
        access: the request's record.
        model: the served model's name.
        thinks: whether the model marks its thoughts, so that they may have a budget.
    """

    def __init__(self, access: AccessRecord, model: str, *, thinks: bool = False) -> None:
        self._thinks = thinks
        self._head = {"id": f"msg_{access.id}", "type": "message", "role": "assistant", "model": model}
        self._output = Output()
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage: dict[str, Any] | None = None

    def read(self, given: dict[str, Any], ready: Ready) -> GenerationRequest:
        """Reads the body.

        Raises:
            Refusal: a field is wrong, in this route's words.
        """
        form = read_form(MessagesForm, given)
        # the model, or an adapter
        self._head["model"] = form.model or self._head["model"]
        generation = _request(form, ready)
        budget = _thinking_budget(form.thinking)
        if self._thinks and budget is not None:
            # clients give one to any model; where there are no thoughts, none is too long
            generation.params["thinking_token_budget"] = budget
            check_params(generation.params, type(form).model_fields, ready.vocabulary, {"thinking_token_budget": "thinking"})
        return generation

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the message of a chat's whole answer."""
        (choice,) = answer["choices"]
        self._note(choice)
        self._usage = answer["usage"]
        for _ in (*self._output.take(choice["message"]), *self._output.close()):
            pass
        return self._head | {"content": self._output.blocks, **self._end, "usage": _usage_of(self._usage)}

    async def events(self, chunks: Chunks, access: AccessRecord) -> AsyncGenerator[bytes, None]:
        """Yields the typed events of a chat's stream."""
        usage = _usage_of({"prompt_tokens": access.prompt_tokens, "completion_tokens": 0})
        begun = self._head | {"content": [], **self._end, "usage": usage}
        yield event({"type": "message_start", "message": begun}, "message_start")
        try:
            async with aclosing(chunks):
                async for together in chunks:
                    found = [event(each, each["type"]) for chunk in together for each in self._take(chunk)]
                    if found:
                        yield b"".join(found)
            for each in (*self._output.close(), self._delta(), {"type": "message_stop"}):
                yield event(each, each["type"])
        except Exception as error:
            yield event(anthropic_body(end_of(error, access)), "error")

    def _take(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            yield from self._output.take(choice["delta"])
            self._note(choice)

    def _note(self, choice: dict[str, Any]) -> None:
        """Notes how an answer has ended.

        Raises:
            Refusal: no token may follow it.
        """
        finish, stop = choice["finish_reason"], choice["stop_reason"]
        if finish == "abort":
            raise Refusal("invalid_grammar", "no token may follow the answer, whatever forbids them")
        if finish is not None:
            ended = "stop_sequence" if isinstance(stop, str) else _STOPS.get(finish, "end_turn")
            self._end = {"stop_reason": ended, "stop_sequence": stop if isinstance(stop, str) else None}

    def _delta(self) -> dict[str, Any]:
        assert self._usage is not None
        return {"type": "message_delta", "delta": self._end, "usage": _usage_of(self._usage)}


def count_request(given: dict[str, Any], ready: Ready) -> GenerationRequest:
    """Reads the body of /v1/messages/count_tokens.

    Raises:
        Refusal: a field is wrong, in this route's words.
    """
    return _request(read_form(CountForm, given), ready)


def _request(form: CountForm, ready: Ready) -> GenerationRequest:
    chat = {name: value for name, value in _chat_of(form).items() if value is not None}
    try:
        return chat_request(read_form(ChatForm, chat), ready)
    except Refusal as refusal:
        name = refusal.param and _NAMES.get(refusal.param, refusal.param)
        raise Refusal(refusal.code, rename(refusal.message, _NAMES), param=name, headers=refusal.headers) from None


def _chat_of(form: CountForm) -> dict[str, Any]:
    """Returns the fields of a chat; None where there is nothing to say."""
    if form.thread is not None:
        why = "thread asks for a conversation that the server keeps; none is kept here: send all messages"
        raise Refusal("unsupported", why, param="thread")
    output = read_part(OutputForm, form.output_config, "output_config")
    edits = form.context_management or {}
    if not isinstance(edits, dict) or edits.keys() - {"edits"} or any(each != _KEEPS for each in edits.get("edits") or []):
        why = "context_management edits the conversation, which is read as it is sent; leave it out"
        raise Refusal("unsupported", why, param="context_management")
    found: dict[str, Any] = {
        "model": form.model, "messages": messages_of(form.messages, form.system),
        "tools": None if not form.tools else _tools_of(form.tools),
        "reasoning_effort": None if output is None else output.effort,
        "response_format": None if output is None else _format_of(output.format),
    } | _choice_of(form.tool_choice) | _thinking_of(form.thinking)  # fmt: skip
    if isinstance(form, MessagesForm):
        found |= {
            "max_tokens": form.max_tokens, "stop": form.stop_sequences, "temperature": form.temperature, "top_p": form.top_p,
            "top_k": form.top_k, "stream": form.stream, "stream_options": {"include_usage": True} if form.stream else None,
        }  # fmt: skip
    return found


def _thinking_of(given: Any) -> dict[str, Any]:
    thinking = read_part(ThinkingForm, given, "thinking")
    if thinking is None or thinking.type == "adaptive":
        return {}
    if thinking.type == "disabled":
        return {"enable_thinking": False}
    return {"enable_thinking": True}


def _thinking_budget(given: Any) -> int | None:
    thinking = read_part(ThinkingForm, given, "thinking")
    return thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None


def _format_of(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given.get("schema")}}


def _tools_of(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise _bad("tools", "tools must be a list of objects with a name and an input_schema")
    found = []
    for place, tool in enumerate(given):
        if tool.get("type", "custom") != "custom":
            why = f"tools[{place}] is of type {str(tool['type'])[:40]!r}; only a client's own tools are called here"
            raise Refusal("unsupported", why, param=f"tools[{place}]")
        said = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        found.append({"type": "function", "function": said | {"parameters": tool.get("input_schema")}})
    return found


def _choice_of(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in (*_CHOICES, "tool"):
        raise _bad("tool_choice", "tool_choice must be an object of type auto, any, tool with a name, or none")
    named = {"type": "function", "function": {"name": given.get("name")}}
    found: dict[str, Any] = {"tool_choice": named if kind == "tool" else _CHOICES[kind]}
    return found | ({"parallel_tool_calls": False} if given.get("disable_parallel_tool_use") else {})


def _usage_of(chat: dict[str, Any]) -> dict[str, Any]:
    """Returns the tokens in Anthropic's words, where the cached ones are counted apart."""
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "input_tokens": chat["prompt_tokens"] - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        "output_tokens": chat["completion_tokens"],
    }  # fmt: skip


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
