"""`Followed`: a request in the engine's process, and what its client has been sent of it."""

from __future__ import annotations

from rooftile.engine.requests.output import logprobs_at
from rooftile.engine.requests.request import Answer, Request
from rooftile.engine.text.detokenizer import Detokenizer
from rooftile.server.engine.messages import AnswerPiece, News, Ranked, Scored


class Followed:
    """A request whose growth is sent; each token and character is sent once, so a step costs the same in a long answer.

    Args:
        id: the request's number in the server's process.
        request: the engine's request.
        streams: whether news is due before all answers are complete.
    """

    def __init__(self, id: int, request: Request, *, streams: bool) -> None:
        self.id = id
        self.request = request
        # logprobs are sent as they come, since all of a long answer at once would be too long for a message; a search changes
        # its mind about every token until its end
        self.streams = (streams or request.params.logprobs is not None) and request.search is None
        self.started = False
        # text costs this process's core, for which the GPU waits. It is made here where it may end the answer, or where it goes
        # with logprobs, whose tokens' texts are made here
        params = request.params
        self._sends_ids = not params.stops and params.logprobs is None
        self._sent: dict[int, int] = {}
        self._owes_prompt = params.prompt_logprobs is not None
        self._ended: set[int] = set()
        for answer in request.answers:
            if answer.detokenizer is not None and not self._sends_ids:
                answer.detokenizer.follow()

    def news(self) -> News | None:
        """Returns the growth since the last call; None if nothing is due yet."""
        request = self.request
        finished = not request.live
        if request.error is not None:
            return News(self.id, [], True, request.cached_tokens or 0, request.error)
        if not finished and not self.streams:
            return None
        pieces = [self._piece(answer) for answer in request.answers[: request.params.n] if answer.index not in self._ended]
        if not pieces and not finished:
            return None
        return News(self.id, pieces, finished, request.cached_tokens or 0, None, self._prompt(), request.paged_tokens)

    def _prompt(self) -> list[Ranked] | None:
        """Returns the logprobs of the prompt's tokens when all are known, once."""
        request = self.request
        if not self._owes_prompt or len(request.prompt_tops) < len(request.prompt) - 1:
            return None
        self._owes_prompt = False
        return [Ranked(*request.prompt_tops[place]) for place in range(1, len(request.prompt))]

    def _piece(self, answer: Answer) -> AnswerPiece:
        detokenizer, tokens = answer.detokenizer, answer.generated
        if answer.finish_reason is not None:
            self._ended.add(answer.index)
        if self._sends_ids:
            ids = None if detokenizer is None else detokenizer.take_ids()
            return AnswerPiece(answer.index, "", tokens, None, answer.finish_reason, answer.stop_reason, None, answer.score, ids)
        text = "" if detokenizer is None else detokenizer.take()
        if answer.finish_reason is None and detokenizer is not None:
            # a stop string may still take away tokens whose text is held back
            tokens = min(tokens, detokenizer.tokens_released)
        before, self._sent[answer.index] = self._sent.get(answer.index, 0), tokens
        offsets = None if detokenizer is None else self._offsets(detokenizer, before, tokens)
        if self.request.params.logprobs is None:
            return AnswerPiece(
                answer.index, text, tokens, None, answer.finish_reason, answer.stop_reason, None, answer.score, None, offsets
            )
        return AnswerPiece(
            answer.index, text, tokens, self._logprobs(answer, before, tokens), answer.finish_reason, answer.stop_reason,
            answer.logprob, None, None, offsets,
        )  # fmt: skip

    def _offsets(self, detokenizer: Detokenizer, first: int, last: int) -> list[int]:
        """Returns where the texts of tokens begin; a token that ends the answer has no text, and comes after it."""
        offsets = detokenizer.begins[first:last]
        return offsets + [detokenizer.length] * (last - first - len(offsets))

    def _logprobs(self, answer: Answer, first: int, tokens: int) -> list[list[Scored]]:
        """Returns the logprobs of the tokens that have not been sent."""
        request = answer.request
        start, count = len(request.prompt) + first, request.params.logprobs or 0
        ids = answer.ids[start : len(request.prompt) + tokens]
        found = []
        for place, (token, top) in enumerate(zip(ids, answer.tops[first:tokens], strict=True), start):
            shown = logprobs_at(token, top, count, answer.text_at(place))
            scored = {id_: self._scored(id_, one.logprob, one.decoded_token or "") for id_, one in shown.items()}
            found.append([scored[token], *(scored[id_] for id_ in top.ids[:count])])
        return found

    def _scored(self, token: int, logprob: float, text: str) -> Scored:
        tokenizer = self.request.tokenizer
        raw = tokenizer.bytes_of(token) if tokenizer is not None and "\ufffd" in text else None
        return Scored(token, logprob, text, raw)
