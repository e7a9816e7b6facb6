"""`Responder`: one request from its tokens to its last answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from rooftile.engine.chat.parts import Part
from rooftile.engine.chat.tools.use import ToolUse
from rooftile.errors import InvalidInput
from rooftile.server import limits
from rooftile.server.admission import Ticket
from rooftile.server.engine.calls import EngineDown, EngineRefused, RemoteCall
from rooftile.server.engine.messages import AnswerPiece, News
from rooftile.server.http.intake import in_time, late, own_mistake
from rooftile.server.http.openai.chat_answers import ChatReaders
from rooftile.server.http.openai.complete_answers import Usage
from rooftile.server.http.openai.forms import ChatForm, CompletionForm
from rooftile.server.http.openai.generation import GenerationRequest, refusal_of
from rooftile.server.http.openai.prompts import ScoredPrompt
from rooftile.server.http.texts import AnswerDecoder, Texts
from rooftile.server.observe.log import AccessRecord
from rooftile.server.refusals import Refusal
from rooftile.server.replicas.engines import Engines
from rooftile.server.service import Service

_FIELDS = CompletionForm.model_fields | ChatForm.model_fields


class Responder:
    """A request that is tokenised, admitted and sent to the engine; `close` takes everything back.

    Args:
        service: the server.
        generation: the request.
        access: what the log will say about it.
        deadline: by this time of the event loop it must be over.
    """

    def __init__(self, service: Service, generation: GenerationRequest, access: AccessRecord, deadline: float) -> None:
        self.generation = generation
        self.usage = Usage()
        self.tokens: list[list[int]] = []
        """The tokens of each prompt that are read."""
        self.scored: dict[int, ScoredPrompt] = {}
        """The logprobs of prompts, by their places, where they are asked for."""
        self._service = service
        self._access = access
        self._deadline = deadline
        self._calls: list[RemoteCall] = []
        self._tickets: list[Ticket] = []
        self._engines: Engines | None = None
        self._decoder: AnswerDecoder | None = None
        self._readers: ChatReaders | None = None
        self._began = time.monotonic()
        self._last: dict[tuple[int, int], float] = {}
        self._ended: set[tuple[int, int]] = set()
        self._cached: dict[int, tuple[int, int]] = {}

    async def begin(self) -> None:
        """Returns when the engine has taken the request.

        Raises:
            Refusal: it cannot be answered, or not now.
        """
        engines, texts, _ = self._service.check()
        self._engines = engines
        self._service.live.add(self)
        try:
            async with in_time(self._deadline, self._began):
                tools = self.generation.tools
                if tools is not None:
                    texts.check_tools(tools)
                self.tokens = await self.generation.tokens(texts)
                if tools is not None:
                    self._constrain_calls(texts, tools)
                if self.generation.chat and (marks := texts.special_marks(tools)):
                    self.generation.params["shown_special_tokens"] = list(marks)
                if self.generation.chat and texts.thoughts is not None:
                    self.generation.params["thinks"] = True
                self._decoder = AnswerDecoder(texts, self.generation.params, self.tokens)
                self._readers = ChatReaders(lambda place: texts.reader(self.tokens[place], tools), self._decoder.tokens_before)
                self.usage.thoughts = {} if self.generation.chat and texts.thoughts is not None else None
                # the server may have begun to drain meanwhile
                self._service.check()
                await self._send(engines)
        except InvalidInput as error:
            refusal = refusal_of(error, _FIELDS, self.generation.names)
            refusal.param = refusal.param or ("messages" if self.generation.chat else "prompt")
            raise refusal from None
        except EngineRefused as error:
            if error.ours:
                raise own_mistake(error, self._access) from None
            if str(error).startswith("the grammar"):
                raise Refusal("invalid_grammar", str(error), param=self.generation.names.get("structured")) from None
            raise refusal_of(error, _FIELDS, self.generation.names) from None

    def _constrain_calls(self, texts: Texts, tools: ToolUse) -> None:
        """Lets calls follow the schemas of their functions."""
        params = self.generation.params
        calls = texts.constraint(tools, structured="structured" in params, search="beam_width" in params)
        if calls is not None:
            params["calls"], self.generation.names["structured"] = calls, "tools"

    async def _send(self, engines: Engines) -> None:
        generation, sizes = self.generation, [len(each) for each in self.tokens]
        longest = self._service.check()[2].max_len
        most_tokens = generation.params.get("max_tokens")
        if most_tokens is not None and most_tokens > longest - max(sizes):
            self.usage.max_tokens = max(longest - max(sizes), 0)
        if max(sizes) >= longest:
            why = f"the prompt has {max(sizes):,} tokens, and a sequence at most {longest:,}, one of them for the answer"
            raise Refusal("invalid_value", why, param="messages" if generation.chat else "prompt")
        scores = 0 if generation.forms.most is None else sum(sizes) * (1 + generation.forms.most) * generation.n
        if scores > limits.PROMPT_SCORES:
            field = "logprobs" if generation.prompt_logprobs is None else "prompt_logprobs"
            most = f"{limits.PROMPT_SCORES:,}"
            why = f"{field} asks for {scores:,} numbers about the prompts; a request may have {most}: send fewer prompts"
            raise Refusal("invalid_value", why, param=field)
        self._tickets = self._service.admission.admit(self._access.key, [(generation.sampled, size) for size in sizes])
        # a key's name is part of the salt: keys share no prefixes, whose times could tell one what another has asked
        salt = f"{self._access.key}\0{generation.salt}"
        for tokens, ticket in zip(self.tokens, self._tickets, strict=True):
            # noted one by one and before anything is waited for: whatever happens, `close` takes back what was sent
            call = engines.send(
                tokens, generation.params, salt=salt, streams=generation.stream, answers=ticket.answers, started=ticket.start,
                adapter=generation.adapter,
            )  # fmt: skip
            self._calls.append(call)
        await asyncio.gather(*(call.taken for call in self._calls))
        self.usage.prompt = self._access.prompt_tokens = sum(sizes)

    async def news(self) -> AsyncGenerator[tuple[int, News], None]:
        """Yields the place of a prompt and what is new in its answers, until all are complete.

        Raises:
            Refusal: the time is over, the engine has failed, or the server stops.
        """
        left, merged, loop = len(self._calls), _Merged(self._calls), asyncio.get_running_loop()
        # one timer for the whole answer, and not one per token
        timer = loop.call_at(self._deadline, lambda: self.stop(late(self._began)))
        try:
            while left:
                place, news = await merged.next()
                left -= news.finished
                if self._decoder is not None:
                    await self._decoder.fill(place, news)
                    if news.prompt is not None:
                        self.scored[place] = await self._decoder.score_prompt(place, news.prompt, self.generation.forms)
                if self.generation.prompt_only:
                    _leave_out(news)
                self._note(place, news)
                yield place, news
        except EngineDown as error:
            raise Refusal("engine_down", str(error)) from None
        finally:
            timer.cancel()
            merged.close()

    def read(self, place: int, piece: AnswerPiece) -> list[Part]:
        """Returns the parts that a piece of a chat's answer completes, and counts the tokens of its thought; once per piece."""
        assert self._readers is not None
        parts = self._readers.read(place, piece)
        if self.usage.thoughts is not None:
            answer = place, piece.index
            self.usage.thoughts[answer] = self._readers.thought_tokens(answer)
        return parts

    def echoed(self, place: int) -> dict[str, list[Any]] | None:
        """Returns the logprobs of a prompt that is echoed, in the form of completions."""
        return self.scored[place].echoed if place in self.scored else None

    def listed(self, place: int) -> dict[str, Any]:
        """Returns the field with the logprobs of a prompt, if they were asked for."""
        return {} if self.generation.prompt_logprobs is None else {"prompt_logprobs": self.scored[place].listed}

    def stop(self, refusal: Refusal) -> None:
        """Ends the answers that still run; the client is told why, after the text that it has."""
        for place, call in enumerate(self._calls):
            if not call.over:
                call.fail(refusal)
                self._leave(place, call)

    def close(self) -> None:
        """Aborts what still runs, and gives its place in the queue to others."""
        self._service.live.discard(self)
        for place, call in enumerate(self._calls):
            self._leave(place, call)
        for ticket in self._tickets:
            ticket.end()

    def _leave(self, place: int, call: RemoteCall) -> None:
        assert self._engines is not None
        if self._engines.leave(call):
            for index in range(self.generation.params.get("n", 1)):
                if (place, index) not in self._ended:
                    self._service.metrics.note_end("abort")

    def _note(self, place: int, news: News) -> None:
        """Keeps the account; raises the request's own failure."""
        access, metrics, now = self._access, self._service.metrics, time.monotonic()
        if news.error is not None:
            metrics.note_end("error")
            if news.error.startswith("the answer's grammar"):
                raise Refusal("invalid_grammar", news.error, param=self.generation.names.get("structured"))
            raise own_mistake(news.error, access)
        if (news.cached, news.paged) != self._cached.get(place):
            self._cached[place] = news.cached, news.paged
            cached, paged = map(sum, zip(*self._cached.values(), strict=True))
            self.usage.cached = access.cached_tokens = cached
            self.usage.paged = access.paged_tokens = paged
        for piece in news.pieces:
            index = place, piece.index
            more = piece.tokens - self.usage.completion.get(index, 0)
            if more > 0:
                metrics.generated.inc(more)
                if index in self._last:
                    metrics.gaps.observe(now - self._last[index])
                self._last[index] = now
                if access.first_token_s is None:
                    access.first_token_s = now - self._began
            self.usage.completion[index] = piece.tokens
            access.completion_tokens += more
            if piece.finish is not None:
                self._ended.add(index)
                metrics.note_end(piece.finish)
                access.end = piece.finish


def _leave_out(news: News) -> None:
    """Leaves out what a prompt was answered, where nothing was to be answered."""
    for piece in news.pieces:
        piece.text, piece.tokens, piece.stop, piece.logprobs, piece.offsets = "", 0, None, [], []
        piece.finish = None if piece.finish is None else "length"


class _Merged:
    """The news of several calls in the order in which they come. What is not read in time waits in its call, joined."""

    def __init__(self, calls: Sequence[RemoteCall]) -> None:
        self._calls = calls
        self._queue: asyncio.Queue[tuple[int, News | Exception]] = asyncio.Queue(1)
        several = enumerate(calls) if len(calls) > 1 else ()
        self._pumps = [asyncio.create_task(self._pump(place, call)) for place, call in several]

    async def next(self) -> tuple[int, News]:
        """Returns the place of a call, and its news."""
        if not self._pumps:
            return 0, await anext(self._calls[0])
        place, news = await self._queue.get()
        if isinstance(news, Exception):
            raise news
        return place, news

    def close(self) -> None:
        """Ends the tasks."""
        for pump in self._pumps:
            pump.cancel()

    async def _pump(self, place: int, call: RemoteCall) -> None:
        try:
            async for news in call:
                await self._queue.put((place, news))
        except Exception as error:
            await self._queue.put((place, error))
