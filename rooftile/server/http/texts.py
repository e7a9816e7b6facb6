"""`Texts`: the tokenizer of the served model, in two threads, so that no long text holds up the event loop.

`AnswerDecoder` makes the texts of a request's answers with it, in the event loop where the text is short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rooftile.engine.chat.parts import PlainReader, Reader
from rooftile.engine.chat.reading import choose_reading, marks_of, reader_of
from rooftile.engine.chat.thought_formats import AUTO
from rooftile.engine.chat.tools.choose import why_no_syntax
from rooftile.engine.chat.tools.constraint import constraint_of
from rooftile.engine.chat.tools.use import ToolUse
from rooftile.engine.loop.pauses import give_way
from rooftile.errors import InvalidInput
from rooftile.server import limits
from rooftile.server.engine.messages import News, Ranked
from rooftile.server.http.openai.prompts import PromptForms, ScoredPrompt, score_prompt
from rooftile.server.refusals import Refusal, retry_later

if TYPE_CHECKING:
    # slow to import, and needed only when the engine is ready
    from rooftile.engine.embedding.folder import Recipe
    from rooftile.engine.embedding.reading import TextReader
    from rooftile.engine.text.detokenizer import Detokenizer
    from rooftile.engine.text.tokenizer import Tokenizer

T = TypeVar("T")


class Texts:
    """Encodes and decodes in threads.

    Args:
        tokenizer: the model's tokenizer, or None.
        thoughts: the format of thoughts (see `choose_format`).
        calls: the syntax of calls (see `choose_syntax`).
    """

    def __init__(self, tokenizer: Tokenizer | None, thoughts: str = AUTO, calls: str = AUTO) -> None:
        self._tokenizer = tokenizer
        self.thoughts, self.syntax = choose_reading(tokenizer, thoughts, calls)
        """How the model marks its thoughts, and how it writes calls; None for what it does not, or not in a way that is known."""
        self._calls = calls
        self._threads = ThreadPoolExecutor(limits.TOKENISING_THREADS, "tokenizer")
        self._queued = 0

    def text_reader(self, recipe: Recipe, max_len: int, vocabulary: int) -> TextReader:
        """Returns what reads the texts of a model that embeds them."""
        from rooftile.engine.embedding.reading import TextReader

        return TextReader(self._tokenizer, recipe, max_len, vocabulary, limits.PROMPT_BYTES)

    @classmethod
    async def load(
        cls, folder: str | None, template: str | None = None, thoughts: str = AUTO, calls: str = AUTO
    ) -> Texts:  # fmt: skip
        """Loads the tokenizer of a folder, in a thread.

        Args:
            folder: the folder; None if the model has no tokenizer.
            template: takes the place of the folder's chat template.
            thoughts: the format of thoughts (see `choose_format`).
            calls: the syntax of calls (see `choose_syntax`).
        """
        if folder is None:
            return cls(None)
        with ThreadPoolExecutor(1, "loader") as thread:
            return cls(await asyncio.get_running_loop().run_in_executor(thread, _load, folder, template), thoughts, calls)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer is not None and self._tokenizer.has_template

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns a text's token ids."""
        return await self._run(lambda own: own.encode(text, special, most_bytes=limits.PROMPT_BYTES))

    async def strings(self, ids: Sequence[int]) -> list[str]:
        """Returns the vocabulary's spellings of tokens."""
        return await self._run(lambda own: [own.token(id) for id in ids])

    async def chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Returns a conversation's token ids; `options` are keywords of `Tokenizer.chat`."""
        return await self._run(lambda own: own.chat(messages, **options, most_bytes=limits.PROMPT_BYTES))

    async def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Returns the text of token ids."""
        return await self._run(lambda own: own.decode(ids, skip_special))

    async def prompt_text(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Returns the text of a prompt, up to a character that only its answer may complete."""
        from rooftile.engine.text.border import prompt_text

        return await self._run(lambda own: prompt_text(own, ids, skip_special))

    async def score_prompt(self, ids: Sequence[int], ranked: Sequence[Ranked], forms: PromptForms) -> ScoredPrompt:
        """Returns the logprobs of a prompt as its client gets them."""
        return await self.in_thread(lambda: score_prompt(self._tokenizer, ids, ranked, forms))

    def check_tools(self, use: ToolUse | None) -> None:
        """Raises InvalidInput if the model's calls cannot be read, and there are tools to call."""
        if use is not None and self.syntax is None:
            raise InvalidInput(why_no_syntax(self._calls))

    def constraint(self, use: ToolUse | None, *, structured: bool, search: bool) -> dict[str, Any] | None:
        """Returns how the calls of answers are constrained (see `constraint_of`); None for answers without tools.

        Raises:
            InvalidInput: a call must be made, or at most one, and nothing would keep the answer to it.
        """
        if use is None or self.syntax is None or self._tokenizer is None:
            return None
        return constraint_of(self.syntax, use, self._tokenizer.added_id, structured=structured, search=search)

    def special_marks(self, use: ToolUse | None) -> tuple[str, ...]:
        """Returns the marks around thoughts and calls that are special tokens, which texts usually leave out."""
        if self._tokenizer is None:
            return ()
        return self._tokenizer.special_tokens(marks_of(self.thoughts, self.syntax, use))

    def reader(self, prompt: Sequence[int], use: ToolUse | None) -> Reader:
        """Returns the reader of a chat's answer to a prompt."""
        if self._tokenizer is None:
            return PlainReader()
        return reader_of(self._tokenizer, prompt, self.thoughts, self.syntax, use)

    def growing(self, skip_special: bool, prompt: Sequence[int], shown: Sequence[str] = ()) -> Detokenizer:
        """Returns what makes the text of one answer to a prompt, whose tokens are not searched for stop strings here."""
        from rooftile.engine.sampling.params import SamplingParams
        from rooftile.engine.text.detokenizer import Detokenizer

        assert self._tokenizer is not None, "tokens that belong to a text come from an engine with a tokenizer"
        return Detokenizer(self._tokenizer, SamplingParams(skip_special_tokens=skip_special, shown_special_tokens=shown), prompt)

    def tokens_before(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        begins: Sequence[int],
        place: int,
        *,
        skip_special: bool,
        shown: Sequence[str] = (),
    ) -> int:
        """Returns how many tokens of an answer begin before a place in its text (see `token_places.tokens_before`)."""
        from rooftile.engine.text.token_places import tokens_before

        assert self._tokenizer is not None, "a text was made by a tokenizer"
        return tokens_before(self._tokenizer.showing(shown), prompt, ids, begins, place, skip_special=skip_special)

    async def read(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns in one of the threads, as one of the texts that may wait for them."""
        if self._queued >= limits.TOKENISING:
            raise retry_later("queue_full", f"{self._queued} texts wait for the tokenizer, as many as may; try again in 1 s", 1)
        self._queued += 1
        try:
            return await self.in_thread(work)
        finally:
            self._queued -= 1

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns in one of the threads."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except RuntimeError as error:
            if "shutdown" in str(error):
                raise Refusal("shutting_down", "the server is shutting down") from None
            raise

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[Tokenizer], T]) -> T:
        if self._tokenizer is None:
            raise InvalidInput("the model has no tokenizer; give token ids")
        tokenizer = self._tokenizer
        return await self.read(lambda: work(tokenizer))


class AnswerDecoder:
    """The texts of a request's answers, where the engine sends their tokens only.

    Args:
        texts: the tokenizer.
        params: the request's keywords of `SamplingParams`.
        prompts: the tokens of each prompt that are read.
    """

    def __init__(self, texts: Texts, params: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> None:
        self._texts = texts
        self._prompts = prompts
        self._skip_special = params.get("skip_special_tokens", True)
        self._shown = params.get("shown_special_tokens", ())
        self._growing: dict[tuple[int, int], Detokenizer] = {}
        self._ids: dict[tuple[int, int], list[int]] = {}

    async def fill(self, place: int, news: News) -> None:
        """Gives each piece of news about a prompt the text of its tokens.

        Raises:
            Refusal: the server is shutting down.
        """
        if sum([len(piece.ids) for piece in news.pieces if piece.ids]) > limits.DECODED_AT_ONCE:
            await self._texts.in_thread(lambda: self._fill(place, news))
        else:
            self._fill(place, news)

    def tokens_before(self, answer: tuple[int, int], place: int) -> int | None:
        """Returns how many tokens of an answer begin before a place in its text; None if its text comes from the engine."""
        text = self._growing.get(answer)
        if text is None:
            return None
        prompt, skip = self._prompts[answer[0]], self._skip_special
        return self._texts.tokens_before(prompt, self._ids[answer], text.begins, place, skip_special=skip, shown=self._shown)

    async def score_prompt(self, place: int, ranked: Sequence[Ranked], forms: PromptForms) -> ScoredPrompt:
        """Returns the logprobs of a prompt as its client gets them.

        Raises:
            Refusal: the server is shutting down.
        """
        return await self._texts.score_prompt(self._prompts[place], ranked, forms)

    def _fill(self, place: int, news: News) -> None:
        for piece in news.pieces:
            if piece.ids is None:
                continue
            answer = place, piece.index
            text = self._growing.get(answer)
            if text is None:
                text = self._growing[answer] = self._texts.growing(self._skip_special, self._prompts[place], self._shown)
            text.add(piece.ids)
            if self._texts.thoughts is not None:
                self._ids.setdefault(answer, []).extend(piece.ids)
            if piece.finish is None:
                piece.text = text.take()
                # a token is counted when its text is there, like one whose text the engine holds back for a stop string
                piece.tokens = min(piece.tokens, text.tokens_released)
            else:
                text.finish()
                piece.text = text.take()


def _load(folder: str, template: str | None) -> Tokenizer:
    """Loads a tokenizer; called in a thread that ends with it."""
    from rooftile.engine.text.tokenizer import LONG, Tokenizer

    tokenizer = Tokenizer.from_folder(Path(folder), place="the checkpoint", template=template)
    # the tokenizer's own threads, which encode long texts, begin here and inherit this thread's priority
    give_way()
    tokenizer.encode("a " * LONG)
    if tokenizer.has_template:
        # imports what templates need, so that the first chat does not wait for it; a template may refuse these messages
        with suppress(InvalidInput):
            tokenizer.chat([{"role": "user", "content": ""}])
    return tokenizer
