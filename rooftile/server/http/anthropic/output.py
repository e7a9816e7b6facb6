"""A chat's answer as blocks of a message, and as the typed events of its stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Event = dict[str, Any]


class Output:
    """Puts the blocks of one answer together from what a chat says."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        """The blocks in the order in which the model has begun them; the input of a call is whole when its block has ended."""
        self._open: dict[str, Any] | None = None
        self._arguments = ""

    def take(self, delta: dict[str, Any]) -> Iterator[Event]:
        """Adds a chat's delta, or its whole message; yields the events."""
        if thought := delta.get("reasoning_content"):
            yield from self._grow("thinking", "thinking", thought)
        if text := delta.get("content"):
            yield from self._grow("text", "text", text)
        for call in delta.get("tool_calls") or []:
            if call.get("id"):
                name = call["function"]["name"]
                yield from self._begin({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
                self._arguments = ""
            if more := call["function"].get("arguments"):
                self._arguments += more
                yield self._delta({"type": "input_json_delta", "partial_json": more})

    def close(self) -> Iterator[Event]:
        """Ends the block that grows; yields the events."""
        block, self._open = self._open, None
        if block is None:
            return
        if block["type"] == "thinking":
            # what was thought here needs no signature when it comes back
            yield self._delta({"type": "signature_delta", "signature": ""})
        if block["type"] == "tool_use":
            block["input"] = _input(self._arguments)
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _grow(self, kind: str, name: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin({"type": kind, name: ""} | ({"signature": ""} if kind == "thinking" else {}))
        assert self._open is not None
        self._open[name] += text
        yield self._delta({"type": f"{kind}_delta", name: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._open = block
        self.blocks.append(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _input(arguments: str) -> Any:
    """Returns the arguments of a call; of one that was broken off, the text that has come."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"incomplete": arguments}
