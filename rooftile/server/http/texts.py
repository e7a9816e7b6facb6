"""`Texts`: the tokenizer of the served model, in two threads, so that no long text holds up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rooftile.errors import InvalidInput
from rooftile.server import limits
from rooftile.server.engine.pauses import give_way
from rooftile.server.refusals import Refusal, retry_later

if TYPE_CHECKING:
    # slow to import, and needed only when the engine is ready
    from rooftile.serve.text.tokenizer import Tokenizer

T = TypeVar("T")


class Texts:
    """Encodes and decodes in threads.

    Args:
        tokenizer: the model's tokenizer; None if it has none.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(limits.TOKENISING_THREADS, "tokenizer")
        self._queued = 0

    @classmethod
    async def load(cls, folder: str | None) -> Texts:
        """Loads the tokenizer of a folder, in a thread."""
        if folder is None:
            return cls(None)
        with ThreadPoolExecutor(1, "loader") as thread:
            return cls(await asyncio.get_running_loop().run_in_executor(thread, _load, folder))

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns a text's token ids."""
        return await self._run(lambda own: own.encode(text, special, most_bytes=limits.PROMPT_BYTES))

    async def chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
        """Returns a conversation's token ids."""
        return await self._run(lambda own: own.chat(messages, add_generation_prompt, most_bytes=limits.PROMPT_BYTES))

    async def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Returns the text of token ids."""
        return await self._run(lambda own: own.decode(ids, skip_special))

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[Tokenizer], T]) -> T:
        if self._tokenizer is None:
            raise InvalidInput("the model has no tokenizer; give token ids")
        if self._queued >= limits.TOKENISING:
            raise retry_later("queue_full", f"{self._queued} texts wait for the tokenizer, as many as may; try again in 1 s", 1)
        tokenizer = self._tokenizer
        self._queued += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, tokenizer)
        except RuntimeError as error:
            if "shutdown" in str(error):
                raise Refusal("shutting_down", "the server is shutting down") from None
            raise
        finally:
            self._queued -= 1


def _load(folder: str) -> Tokenizer:
    """Loads a tokenizer; called in a thread that ends with it."""
    from rooftile.serve.text.tokenizer import LONG, Tokenizer

    tokenizer = Tokenizer.from_folder(Path(folder), place="the checkpoint")
    # the tokenizer's own threads, which encode long texts, begin here and inherit this thread's priority
    give_way()
    tokenizer.encode("a " * LONG)
    if tokenizer.has_template:
        # imports what templates need, so that the first chat does not wait for it; a template may refuse these messages
        with suppress(InvalidInput):
            tokenizer.chat([{"role": "user", "content": ""}])
    return tokenizer
