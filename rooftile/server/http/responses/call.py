"""One call of /v1/responses: from its body to a chat, and from the chat's answer to a response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from rooftile.runtime.words import rename
from rooftile.server.engine.messages import Ready
from rooftile.server.http.openai.fields import read_form, read_part
from rooftile.server.http.openai.forms import ChatForm
from rooftile.server.http.openai.generation import GenerationRequest, chat_request
from rooftile.server.http.responses.forms import ReasoningForm, ResponseForm, TextForm
from rooftile.server.http.responses.functions import Functions, tool_choice
from rooftile.server.http.responses.items import messages_of, with_instructions
from rooftile.server.http.responses.output import Output
from rooftile.server.http.responses.store import ResponseStore
from rooftile.server.http.sse import Chunks, end_of, event
from rooftile.server.observe.log import AccessRecord
from rooftile.server.refusals import Refusal

# a chat's fields by the names that a client of this route has sent
_NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens",
    "response_format": "text.format", "reasoning_effort": "reasoning.effort",
}  # fmt: skip
# fields that a response repeats as they were sent, and what they are by default
_REPEATED: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "previous_response_id": None, "temperature": None, "top_p": None,
    "top_logprobs": 0, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "user": None,
    "truncation": "disabled", "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}, "store": True,
}  # fmt: skip
# what `include` may ask for: it is given where it is there
_INCLUDED = ("reasoning.encrypted_content", "message.output_text.logprobs")


class ResponsesCall:
    """One call.

    Args:
        store: the answers that are kept.
        access: the request's record.
        model: the served model's name.
        created: seconds since 1970.
    """

    def __init__(self, store: ResponseStore, access: AccessRecord, model: str, created: int) -> None:
        self._store, self._access = store, access
        self._head = {"id": f"resp_{access.id}", "object": "response", "created_at": created, "model": model}
        self._output = Output(access.id)
        self._given: dict[str, Any] = {}
        self._messages: list[dict[str, Any]] = []
        self._finish: str | None = None
        self._usage: dict[str, Any] | None = None
        self._count = 0

    def read(self, given: dict[str, Any], ready: Ready) -> GenerationRequest:
        """Reads the body.

        Raises:
            Refusal: a field is wrong, in this route's words.
        """
        form = read_form(ResponseForm, given)
        self._head["model"] = form.model or self._head["model"]
        self._given = {name: default if given.get(name) is None else given[name] for name, default in _REPEATED.items()}
        before = []
        if form.previous_response_id is not None:
            before = self._store.find(self._access.key, form.previous_response_id, "previous_response_id").messages
        self._messages = [*before, *messages_of(form.input)]
        functions = None if form.tools is None else Functions(form.tools)
        self._output.functions = functions
        chat = _chat_of(form, functions) | {"messages": with_instructions(form.instructions, self._messages)}
        try:
            return chat_request(read_form(ChatForm, chat), ready)
        except Refusal as refusal:
            # items are put together into messages, whose places tell a client nothing
            head = refusal.param and refusal.param.partition("[")[0]
            name = head and _NAMES.get(head, head)
            raise Refusal(refusal.code, rename(refusal.message, _NAMES), param=name, headers=refusal.headers) from None

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Returns the response of a chat's whole answer."""
        (choice,) = answer["choices"]
        scores = (choice["logprobs"] or {}).get("content")
        for _ in self._output.take(choice["message"], scores):
            pass
        self._finish, self._usage = choice["finish_reason"], answer["usage"]
        for _ in self._output.close(complete=self._finish != "length"):
            pass
        return self._ended()

    async def events(self, chunks: Chunks, access: AccessRecord) -> AsyncGenerator[bytes, None]:
        """Yields the typed events of a chat's stream; the last one has the whole response."""
        begun = self._response("in_progress")
        yield self._event({"type": "response.created", "response": begun})
        yield self._event({"type": "response.in_progress", "response": begun})
        try:
            async with aclosing(chunks):
                async for together in chunks:
                    if found := b"".join([self._event(each) for chunk in together for each in self._take(chunk)]):
                        yield found
            for each in self._output.close(complete=self._finish != "length"):
                yield self._event(each)
            response = self._ended()
            yield self._event({"type": f"response.{response['status']}", "response": response})
        except Exception as error:
            refusal = end_of(error, access)
            failed = self._response("failed", error={"code": refusal.code, "message": refusal.message})
            yield self._event({"type": "response.failed", "response": failed})

    def _take(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            self._finish = choice["finish_reason"] or self._finish
            yield from self._output.take(choice["delta"], (choice["logprobs"] or {}).get("content"))

    def _event(self, value: dict[str, Any]) -> bytes:
        self._count += 1
        return event(value | {"sequence_number": self._count - 1}, value["type"])

    def _ended(self) -> dict[str, Any]:
        """Returns the response, which is kept for later ones."""
        if self._finish == "abort":
            error = {"code": "invalid_grammar", "message": "no token may follow the answer, whatever forbids them"}
            return self._response("failed", error=error)
        cut = self._finish == "length"
        response = self._response("incomplete" if cut else "completed", reason="max_output_tokens" if cut else None)
        if self._given["store"]:
            self._store.keep(self._access.key, response, [*self._messages, self._output.message()])
        return response

    def _response(self, status: str, *, error: dict[str, str] | None = None, reason: str | None = None) -> dict[str, Any]:
        return self._head | self._given | {
            "status": status, "error": error, "incomplete_details": None if reason is None else {"reason": reason},
            "output": [*self._output.items], "usage": None if self._usage is None else _usage_of(self._usage),
        }  # fmt: skip


def _chat_of(form: ResponseForm, functions: Functions | None) -> dict[str, Any]:
    """Returns the fields of a chat."""
    text = read_part(TextForm, form.text, "text")
    thinking = read_part(ReasoningForm, form.reasoning, "reasoning")
    included = [] if form.include is None else form.include
    if not isinstance(included, list) or not all(each in _INCLUDED for each in included):
        raise _bad("include", f"include must be a list of some of {', '.join(_INCLUDED)}")
    if form.stream_options not in (None, {}, {"include_obfuscation": False}, {"include_obfuscation": True}):
        raise _bad("stream_options", "stream_options must have include_obfuscation alone, which changes nothing here")
    scored = form.top_logprobs is not None or _INCLUDED[1] in included
    found = {
        "model": form.model, "temperature": form.temperature, "top_p": form.top_p, "metadata": form.metadata,
        "max_completion_tokens": form.max_output_tokens, "parallel_tool_calls": form.parallel_tool_calls,
        "stream": form.stream, "stream_options": {"include_usage": True} if form.stream else None,
        "logprobs": True if scored else None, "top_logprobs": form.top_logprobs,
        "response_format": None if text is None else _format_of(text.format),
        "reasoning_effort": None if thinking is None else thinking.effort,
        "tools": None if functions is None else functions.tools, "tool_choice": tool_choice(form.tool_choice),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _format_of(given: Any) -> Any:
    """Returns the form of an answer in a chat's words, where the schema is one level deeper."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _usage_of(chat: dict[str, Any]) -> dict[str, Any]:
    details = chat.get("completion_tokens_details") or {}
    return {
        "input_tokens": chat["prompt_tokens"], "output_tokens": chat["completion_tokens"], "total_tokens": chat["total_tokens"],
        "input_tokens_details": {"cached_tokens": chat["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
    }  # fmt: skip


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
