"""Answers that are kept for `previous_response_id`, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from rooftile.server import limits
from rooftile.server.refusals import Refusal


class Kept(NamedTuple):
    """An answer, and the conversation up to it."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]


class ResponseStore:
    """Keeps the newest answers; who has another key does not find them.

    Args:
        most: the most bytes of all, as JSON.
    """

    def __init__(self, most: int = limits.RESPONSES_BYTES) -> None:
        self._most = most
        # JSON, and no objects: these would take several times the bytes that are counted
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self.bytes = 0
        """Bytes of what is kept, as JSON."""

    def keep(self, key: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keeps an answer; the oldest ones give way. One that is larger than all the room is not kept."""
        data = msgspec.json.encode([response, messages])
        if len(data) > self._most:
            return
        self._kept[response["id"]] = key, data
        self.bytes += len(data)
        while self.bytes > self._most:
            self.bytes -= len(self._kept.popitem(last=False)[1][1])

    def find(self, key: str, id: str, param: str | None = None) -> Kept:
        """Returns an answer.

        Raises:
            Refusal: there is none with this id, of this key.
        """
        return Kept(*msgspec.json.decode(self._find(key, id, param)))

    def remove(self, key: str, id: str) -> None:
        """Forgets an answer.

        Raises:
            Refusal: there is none with this id, of this key.
        """
        self.bytes -= len(self._find(key, id, None))
        del self._kept[id]

    def _find(self, key: str, id: str, param: str | None) -> bytes:
        own, data = self._kept.get(id, (None, b""))
        if own != key:
            why = f"no response {id[:80]!r} is kept; the newest {self._most // 2**20} MiB of responses are: send the whole input"
            raise Refusal("not_found", why, param=param)
        return data
