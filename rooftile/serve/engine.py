"""The engine: requests in, tokens out, a step at a time."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence

from rooftile.errors import InvalidInput
from rooftile.kvcache import BlockPool
from rooftile.serve.beam_search import BeamSearch
from rooftile.serve.request import Answer, FinishReason, Request, Top
from rooftile.serve.runner import Result, Runner, top_rows
from rooftile.serve.sampling.params import SamplingParams
from rooftile.serve.scheduler import Scheduler
from rooftile.serve.text.detokenizer import Detokenizer
from rooftile.serve.text.prompt import tokens_of
from rooftile.serve.text.tokenizer import Tokenizer


class Engine:
    """Runs requests together on one model.

    On a GPU a step is begun before the tokens of the one before have reached the host: a token that ends a text is noticed a step
    late, and what was computed after it is dropped. On a CPU, which has nothing to wait for, each step is finished at once.

    Args:
        runner: the model on its device.
        pool: the blocks of its cache.
        max_len: tokens of a sequence.
        max_answers: how many run at once.
        max_batched_tokens: of a step.
        tokenizer: of the model; without one answers have no text, and requests no stop strings.
    """

    def __init__(
        self, runner: Runner, pool: BlockPool, *, max_len: int, max_answers: int, max_batched_tokens: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.tokenizer = tokenizer
        self.pool = pool
        self.max_len = max_len
        self.max_answers = max_answers
        self.scheduler = Scheduler(pool, max_answers, max_batched_tokens)
        self.steps = Counter[str]()
        """Steps, and what was read in them."""
        config = runner.decoder.config
        # some checkpoints name tokens that they have not, for none
        self._eos = frozenset(token for token in config.eos_ids if 0 <= token < config.vocab_size)
        self._ahead = runner.device.type == "cuda"
        self._flying: Result | None = None
        self._count = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.idle and self._flying is None

    def add(self, prompt: Sequence[int], params: SamplingParams, *, salt: str = "") -> Request:
        """Takes a request in, to run as soon as there is room.

        Raises:
            InvalidInput: it can never run; the sentence says why.
        """
        prompt = tokens_of(prompt, self.runner.decoder.config.vocab_size)
        limit = self._checked(prompt, params, salt)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        if params.prompt_logprobs is not None:
            # each of the prompt's tokens must be read: nothing of it is taken from the cache
            salt = secrets.token_hex(16)
        request = Request(self._count, prompt, params, limit, ends, salt)
        self._count += 1
        answers = params.n
        if params.beam_width is not None:
            answers = params.beam_width
            request.search = BeamSearch(
                answers, limit, ends, params.length_penalty, params.early_stopping, least=params.min_tokens
            )
        seed = secrets.randbits(62) if params.seed is None else params.seed
        for n in range(answers):
            words = None if self.tokenizer is None or request.search is not None else Detokenizer(self.tokenizer, params)
            request.answers.append(Answer(request, n, seed + n, list(prompt), words=words))
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request; its answers keep what they have."""
        for answer in request.live:
            self._close(answer, "abort")
        self.scheduler.abort(request)

    def step(self) -> list[Request]:
        """Computes a step. Returns the requests that have got tokens, or have ended.

        If it fails, whatever the error, all requests that run or wait are aborted, and the engine is as good as new.
        """
        try:
            return self._stepped()
        except BaseException:
            self._flying = None
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self.abort(request)
            # of blocks that are found by what they hold, some may not have been written
            self.pool.forget_prefixes()
            raise

    def _stepped(self) -> list[Request]:
        changed: dict[int, Request] = {}
        if self._flying is not None and any(request.search is not None for request in self.scheduler.running):
            # which beams go on is the host's to say
            self._land(changed)
        plan = self.scheduler.schedule()
        begun = None
        if plan.work:
            begun = self.runner.run(plan)
            self.steps.update(steps=1, tokens=sum(work.tokens for work in plan.work))
        elif self._flying is None and not self.scheduler.idle:
            raise AssertionError("requests wait, none runs, and none can be admitted: this is a mistake in the scheduler")
        if self._flying is not None:
            self._land(changed)
        self._flying = begun
        if self._flying is not None and not self._ahead:
            self._land(changed)
        return list(changed.values())

    def _land(self, changed: dict[int, Request]) -> None:
        """Takes in what the step in flight has found."""
        assert self._flying is not None
        result, self._flying = self._flying, None
        for answer, token, top in result.wait():
            request = answer.request
            answer.pending -= 1
            changed[request.id] = request
            if answer.finish_reason is not None:
                continue
            if request.search is None:
                self._take(answer, token, top)
            else:
                assert top is not None
                answer.tops.append(top)
                if all(len(other.tops) for other in request.answers):
                    self._search(request, request.search)
        for work, found in result.prompts:
            for place, top in enumerate(top_rows(found), work.start + 1):
                work.answer.request.prompt_tops[place] = top

    def _take(self, answer: Answer, token: int, top: Top | None) -> None:
        """A token of an answer."""
        request = answer.request
        answer.ids.append(token)
        if top is not None:
            answer.tops.append(top)
            answer.logprob += top.logprob
        if token in request.ends:
            self._finish(answer, "stop", token if token in request.params.stop_token_ids else None)
            return
        if answer.words is not None:
            answer.words.add([token])
        if answer.words is not None and answer.words.stopped is not None:
            self._finish(answer, "stop")
        elif answer.generated == request.limit:
            self._finish(answer, "length")
        elif answer.table is not None and len(answer.ids) // self.pool.size > answer.table.sealed:
            self.pool.seal(answer.table, answer.ids)

    def _search(self, request: Request, search: BeamSearch) -> None:
        """A step of a search: all beams have been read."""
        answers = request.answers
        going = search.step([answer.tops[0].ids for answer in answers], [answer.tops[0].logprobs for answer in answers])
        for answer in answers:
            answer.tops.clear()
        if not search.over:
            ids = [[*answers[successor.parent].ids, successor.token] for successor in going]
            self.scheduler.adopt(answers, [successor.parent for successor in going])
            for answer, known in zip(answers, ids, strict=True):
                answer.ids = known
            return
        self.scheduler.abort(request)
        # as many as there are tokens to tell them apart, at most
        request.answers = answers[: min(request.params.n, len(search.found))]
        for answer, found in zip(request.answers, search.found, strict=False):
            answer.ids = [*request.prompt, *found.tokens]
            answer.logprob, answer.score = found.logprob, found.score
            answer.finish_reason = "stop" if found.tokens[-1] in request.ends else "length"
            if self.tokenizer is not None:
                answer.words = Detokenizer(self.tokenizer, request.params)
                answer.words.add(found.tokens[:-1] if answer.finish_reason == "stop" else found.tokens)
                answer.words.finish()

    def _finish(self, answer: Answer, reason: FinishReason, stop: int | str | None = None) -> None:
        self._close(answer, reason, stop)
        self.scheduler.finish(answer)

    def _close(self, answer: Answer, reason: FinishReason, stop: int | str | None = None) -> None:
        """Ends an answer; also for a stop string that only what was held back shows to be there."""
        words = answer.words
        if words is not None:
            words.finish()
            if words.stopped is not None:
                reason, stop = "stop", words.stopped
                kept = words.tokens_kept
                del answer.ids[len(answer.request.prompt) + kept :]
                answer.logprob -= sum(top.logprob for top in answer.tops[kept:])
                del answer.tops[kept:]
        answer.finish_reason = reason
        answer.stop_reason = stop

    def _checked(self, prompt: list[int], params: SamplingParams, salt: str) -> int:
        """How many tokens an answer may have."""
        if not isinstance(params, SamplingParams):
            raise InvalidInput(f"the sampling parameters are {repr(params)[:40]}; must be SamplingParams")
        if not isinstance(salt, str):
            raise InvalidInput(f"the salt is {repr(salt)[:40]}; must be a string")
        params.check_vocabulary(self.runner.decoder.config.vocab_size)
        if params.stops and (self.tokenizer is None or params.beam_width is not None):
            why = "the model has no tokenizer" if self.tokenizer is None else "a beam search ends at tokens"
            raise InvalidInput(f"stop strings are asked for, and {why}: give stop_token_ids")
        left = self.max_len - len(prompt)
        if left < 1:
            raise InvalidInput(
                f"the prompt has {len(prompt):,} tokens, and a sequence at most {self.max_len:,}, one of them for the answer: "
                f"shorten it, or raise max_model_len and num_blocks if the model allows"
            )
        answers = params.beam_width or params.n
        if answers > self.max_answers:
            raise InvalidInput(f"{answers} answers at once are asked for; at most {self.max_answers} run here (max_num_seqs)")
        limit = left if params.max_tokens is None else min(params.max_tokens, left)
        needed = self.pool.needed_by(len(prompt), limit, answers)
        if needed > self.pool.total:
            raise InvalidInput(
                f"{len(prompt):,} tokens of prompt and {answers} x {limit:,} of answers take {needed:,} blocks of "
                f"{self.pool.size}; the pool has {self.pool.total:,}: ask for fewer, or raise num_blocks"
            )
        return limit
