"""A chat's answer as the items of a response, and as the typed events of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rooftile.server.http.responses.functions import Functions, model_name

Event = dict[str, Any]


class Output:
    """Puts the items of one answer together from what a chat says.

    Args:
        id: the end of the items' ids.
    """

    def __init__(self, id: str) -> None:
        self._id = id
        self.items: list[dict[str, Any]] = []
        """The items in the order in which the model has begun them."""
        self.functions: Functions | None = None
        """The functions of the request, which know a call's namespace."""
        self._open: dict[str, Any] | None = None
        self._calls = 0

    def take(self, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None) -> Iterator[Event]:
        """Adds a chat's delta, or its whole message; yields the events."""
        if thought := delta.get("reasoning_content"):
            yield from self._grow("reasoning", "reasoning_text", thought)
        if text := delta.get("content"):
            yield from self._grow("message", "output_text", text, logprobs or [])
        for call in delta.get("tool_calls") or []:
            yield from self._call(call)

    def close(self, *, complete: bool = True) -> Iterator[Event]:
        """Ends the item that grows; yields the events."""
        item, self._open = self._open, None
        if item is None:
            return
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "function_call":
            name, said = "response.function_call_arguments", {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": f"{name}.done", **place, **said}
        else:
            (part,) = item["content"]
            place["content_index"] = 0
            said = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            yield {"type": f"response.{part['type']}.done", **place, **said}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def message(self) -> dict[str, Any]:
        """Returns the answer as a message of a chat, which a template writes when the conversation goes on."""
        found: dict[str, Any] = {"role": "assistant", "content": ""}
        for item in self.items:
            if item["type"] == "function_call":
                call = {"name": model_name(item), "arguments": item["arguments"]}
                found.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": call})
            else:
                name = "content" if item["type"] == "message" else "reasoning_content"
                found[name] = found.get(name, "") + item["content"][0]["text"]
        return found

    def _grow(self, kind: str, part: str, text: str, logprobs: list[dict[str, Any]] | None = None) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            content: dict[str, Any] = {"type": part, "text": ""}
            if kind == "message":
                item = {"id": self._named("msg"), "type": kind, "role": "assistant", "content": [content]}
                content |= {"annotations": [], "logprobs": []}
            else:
                item = {"id": self._named("rs"), "type": kind, "summary": [], "content": [content]}
            yield from self._begin(item, {"content": []})
            yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": dict(content)}
        assert self._open is not None
        grown = self._open["content"][0]
        grown["text"] += text
        said: dict[str, Any] = {"delta": text}
        if logprobs is not None:
            grown["logprobs"] += logprobs
            said["logprobs"] = logprobs
        yield {"type": f"response.{part}.delta", **self._place(), "content_index": 0, **said}

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        if call.get("id"):
            yield from self.close()
            name = call["function"]["name"]
            item = {
                "id": self._named("fc"), "type": "function_call", "call_id": call["id"], "arguments": "",
                **({"name": name} if self.functions is None else self.functions.call(name)),
            }  # fmt: skip
            yield from self._begin(item, {})
        assert self._open is not None
        if more := call["function"].get("arguments"):
            self._open["arguments"] += more
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": more}

    def _begin(self, item: dict[str, Any], shown: dict[str, Any]) -> Iterator[Event]:
        self._open = item
        self.items.append(item)
        item["status"] = "in_progress"
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item | shown}

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.items) - 1}

    def _named(self, kind: str) -> str:
        self._calls += 1
        return f"{kind}_{self._id}-{self._calls}"
