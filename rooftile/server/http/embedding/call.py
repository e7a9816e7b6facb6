"""`EmbeddingCall`: one request from its texts to their vectors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rooftile.engine.embedding.reading import ReadText, TextReader, not_finite
from rooftile.errors import InvalidInput, Unsupported
from rooftile.server.admission import Ticket
from rooftile.server.engine.calls import EngineRefused, RemoteCall
from rooftile.server.http.intake import in_time, own_mistake
from rooftile.server.http.openai.generation import refusal_of
from rooftile.server.observe.log import AccessRecord
from rooftile.server.refusals import Refusal
from rooftile.server.replicas.engines import Engines
from rooftile.server.service import Service

if TYPE_CHECKING:
    import numpy as np


T = TypeVar("T")
_FIELDS = ("prompt_name", "truncate_prompt_tokens")


class EmbeddingCall:
    """A request whose texts are tokenised, admitted and sent to the engine; `close` takes everything back.

    Args:
        service: the server.
        access: what the log will say about it.
        deadline: by this time of the event loop it must be over.
        field: the field with the texts, which the refusal of a text names.
    """

    def __init__(self, service: Service, access: AccessRecord, deadline: float, field: str) -> None:
        self.sizes: list[int] = []
        """The tokens of each text that the model reads."""
        self._service, self._access, self._deadline, self._field = service, access, deadline, field
        self._call: RemoteCall | None = None
        self._ticket: Ticket | None = None
        self._engines: Engines | None = None
        self._began = time.monotonic()
        self._refusal: Refusal | None = None

    @property
    def tokens(self) -> int:
        """The tokens of all texts."""
        return sum(self.sizes)

    async def vectors(self, read: Callable[[TextReader], Sequence[ReadText]]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Returns the vectors of the texts (n, width), or the scores of pairs (n, 1).

        Args:
            read: makes tokens of the texts; called in a thread.

        Raises:
            Refusal: it cannot be answered, or not now.
        """
        engines, texts, _ = self._service.check()
        self._engines = engines
        self._service.live.add(self)
        try:
            async with in_time(self._deadline, self._began):
                found = await texts.read(lambda: read(self._service.reader))
                # the server may have begun to drain meanwhile
                self._service.check()
                data = await self._ask(engines, found)
        except (InvalidInput, Unsupported) as error:
            refusal = refusal_of(error, _FIELDS)
            # a sentence begins with the field that it is about, and may name another as advice
            if not str(error).startswith(refusal.param or " "):
                refusal.param = self._field
            raise refusal from None
        except EngineRefused as error:
            raise own_mistake(error, self._access) from None
        return vectors_of(data, len(found))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns in a thread: an answer may have millions of numbers."""
        return await self._service.check()[1].in_thread(work)

    async def _ask(self, engines: Engines, texts: Sequence[ReadText]) -> bytes:
        self.sizes = [len(text.tokens) for text in texts]
        (self._ticket,) = self._service.admission.admit(self._access.key, [(1, self.tokens)])
        params: dict[str, Any] = {"lengths": self.sizes}
        if any(text.types is not None for text in texts):
            params["types"] = [kind for text in texts for kind in text.types or [0] * len(text.tokens)]
        tokens = [token for text in texts for token in text.tokens]
        self._call = engines.send(tokens, params, salt="", streams=False, started=self._ticket.start)
        await self._call.taken
        self._access.prompt_tokens = self.tokens
        async for news in self._call:
            if news.vectors is not None:
                self._access.end = "stop"
                self._service.metrics.note_end("stop")
                return news.vectors
        raise EngineRefused("the engine has sent no vectors", ours=True)

    def stop(self, refusal: Refusal) -> None:
        """Ends the request, and tells its client why."""
        if self._call is not None and not self._call.over:
            self._call.fail(refusal)

    def close(self) -> None:
        """Aborts what still runs, and gives its place in the queue to others."""
        self._service.live.discard(self)
        if self._call is not None and self._engines is not None and self._engines.leave(self._call):
            self._service.metrics.note_end("abort")
        if self._ticket is not None:
            self._ticket.end()


def vectors_of(data: bytes, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns vectors as an array; refuses one that has nan or infinity, for which JSON has no word."""
    import numpy as np

    found = np.frombuffer(data, dtype="<f4").reshape(count, -1)
    broken = np.flatnonzero(~np.isfinite(found).all(axis=1))
    if len(broken):
        raise Refusal("server_error", not_finite(int(broken[0])))
    return found
