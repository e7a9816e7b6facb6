"""`RemoteCall`: one request of the server's process to the engine, and what its client has not read yet."""

from __future__ import annotations

import asyncio

from rooftile.server.engine.messages import AnswerPiece, News, Ranked


class EngineDown(RuntimeError):
    """The engine answers no more requests; the sentence says why."""


class EngineRefused(ValueError):
    """The engine cannot take this request; the sentence says why.

    Args:
        reason: the sentence.
        ours: whether the engine is to blame, and not the request.
    """

    def __init__(self, reason: str, *, ours: bool = False) -> None:
        super().__init__(reason)
        self.ours = ours


def _joined(pieces: list[AnswerPiece]) -> AnswerPiece:
    """Returns the growth of one answer in several pieces as one piece."""
    newest = pieces[-1]
    if len(pieces) > 1:
        newest.text = "".join([piece.text for piece in pieces])
        if newest.logprobs is not None:
            newest.logprobs = [scored for piece in pieces for scored in piece.logprobs or ()]
        if newest.ids is not None:
            newest.ids = [token for piece in pieces for token in piece.ids or ()]
        if newest.offsets is not None:
            newest.offsets = [offset for piece in pieces for offset in piece.offsets or ()]
    return newest


class RemoteCall:
    """A request that the engine answers. Iterating over it yields its news; news that is not read in time is joined.

    Args:
        id: the request's number.
        weight: what the request adds to its engine's load.
    """

    def __init__(self, id: int, weight: int = 0) -> None:
        self.id = id
        self.weight = weight
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has the request; or its exception says why not."""
        self.started = False
        """Whether the model has begun to read the prompt."""
        # pieces of each answer that its client has not read yet
        self._unread: dict[int, list[AnswerPiece]] = {}
        self._last: News | None = None
        self._prompt: list[Ranked] | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def take(self, news: News) -> None:
        """Takes news from the engine."""
        for piece in news.pieces:
            self._unread.setdefault(piece.index, []).append(piece)
        self._last = news
        self._prompt = self._prompt if news.prompt is None else news.prompt
        self._changed.set()

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._error is not None or (self._last is not None and self._last.finished)

    def fail(self, error: Exception) -> None:
        """Ends the call with an error, which comes after what has not been read yet."""
        if not self.taken.done():
            self.taken.set_exception(error)
            # the client may have gone without asking
            self.taken.exception()
        self._error = error
        self._changed.set()

    def __aiter__(self) -> RemoteCall:
        return self

    async def __anext__(self) -> News:
        """Returns all news since the last call.

        Raises:
            Exception: the error of `fail`.
        """
        if not self._unread and not self._changed.is_set() and self.over:
            if self._error is not None:
                raise self._error
            raise StopAsyncIteration
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None and not self._unread:
            raise self._error
        assert self._last is not None
        pieces, self._unread = [_joined(pieces) for pieces in self._unread.values()], {}
        prompt, self._prompt = self._prompt, None
        last = self._last
        return News(self.id, pieces, last.finished, last.cached, last.error, prompt, last.paged, last.vectors)
