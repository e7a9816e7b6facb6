"""`Engine`: takes requests in and computes their tokens, step by step."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random, SystemRandom

from rooftile.engine.adapters.adapters import Adapters
from rooftile.engine.chat.reading import choose_reading
from rooftile.engine.chat.thought_formats import AUTO, stops_of
from rooftile.engine.requests.output import RequestOutput, output_of
from rooftile.engine.requests.request import Answer, FinishReason, Request, Top
from rooftile.engine.sampling.beam_search import BeamSearch
from rooftile.engine.sampling.forbidden import emptied_by
from rooftile.engine.sampling.grammar import GrammarFailed, Grammars, Matcher
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.sampler import NOTHING
from rooftile.engine.sampling.steer import steering_of
from rooftile.engine.speculation.speculator import Speculator
from rooftile.engine.steps.runner import Result, Runner
from rooftile.engine.steps.scheduler import Scheduler
from rooftile.engine.text.detokenizer import Detokenizer
from rooftile.engine.text.prompt import banned_sequences, check_tokens
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from rooftile.kvcache import BlockPool
from rooftile.kvcache.states import StateRows


class Engine:
    """Runs requests together on one model.

    On a GPU a step is launched before the tokens of the previous step have reached the host. So a token that ends an answer is
    noticed one step late, and the token computed after it is dropped. An answer whose next step needs its last token on the host
    (see `Request.needs_host`) is in every other step. On a CPU each step is finished at once.

    Args:
        runner: the model on its device.
        pool: the blocks of its KV cache.
        max_len: the longest sequence in tokens, prompt and answer together.
        max_answers: the most answers that run at once.
        max_batched_tokens: the most tokens that the model reads in one step.
        tokenizer: the model's tokenizer; without one answers have no text, and stop strings are refused.
        seed: draws the seeds of requests that have none; None for random ones.
        shares_answers: whether the prefix cache holds the tokens of answers, too (see `Scheduler`).
        states: the rows of states; None if no layer has a state.
        state_every: the tokens of a prompt between two states that are kept.
        reasoning_parser: how the model marks its thoughts (see `choose_format`).
        tool_call_parser: how the model writes calls (see `choose_syntax`).
        speculator: drafts tokens of answers; None for none.
    """

    def __init__(
        self, runner: Runner, pool: BlockPool, *, max_len: int, max_answers: int, max_batched_tokens: int,
        tokenizer: Tokenizer | None = None, seed: int | None = None, shares_answers: bool = True,
        states: StateRows | None = None, state_every: int = 8192, reasoning_parser: str = AUTO,
        tool_call_parser: str = AUTO,
        speculator: Speculator | None = None,
    ) -> None:  # fmt: skip
        self.runner = runner
        self.tokenizer = tokenizer
        self.pool = pool
        self.max_len = max_len
        self.max_answers = max_answers
        self.scheduler = Scheduler(
            pool, max_answers, max_batched_tokens, shares_answers=shares_answers, states=states, state_every=state_every,
            speculator=speculator,
        )  # fmt: skip
        self.speculator = speculator
        self.steps = Counter[str]()
        """How many "steps" were run, and how many "tokens" the model has read in them."""
        self.thoughts, self.calls = choose_reading(tokenizer, reasoning_parser, tool_call_parser)
        """How the model marks its thoughts, and how it writes calls; None for what it does not, or not in a way that is known."""
        self.tool_call_parser = tool_call_parser
        config = runner.decoder.config
        named = (*config.eos_ids, *(() if tokenizer is None else tokenizer.eos_ids), *stops_of(tokenizer, self.thoughts))
        # some checkpoints write an out-of-range id to mean "no EOS token"
        self._eos = frozenset(token for token in named if 0 <= token < config.vocab_size)
        self.adapters = None if runner.adapters is None else Adapters(runner.adapters.count, runner.load_adapter)
        """The adapters that requests may name; None if there is no room for any."""
        self.grammars = None if tokenizer is None else Grammars(tokenizer, config.vocab_size, tuple(self._eos))
        """The grammars of structured output; None without a tokenizer."""
        self._ahead = runner.device.type == "cuda"
        self._in_flight: Result | None = None
        self._count = 0
        self._random: Random = SystemRandom() if seed is None else Random(seed)

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs and no step is in flight."""
        return self.scheduler.idle and self._in_flight is None

    def add(
        self, prompt: Sequence[int], params: SamplingParams, *, cache_salt: str = "", grammar: Matcher | None = None,
        adapter: str | None = None,
    ) -> Request:  # fmt: skip
        """Takes a request in; it runs as soon as there is room.

        Args:
            prompt: token ids.
            params: how to answer it.
            cache_salt: the request shares cached prefixes only with requests of the same salt.
            grammar: the grammar of `params`, if it was compiled already.
            adapter: the name of the adapter that answers it; None for the model as it is.

        Raises:
            InvalidInput: the request can never run; the sentence says why.
        """
        prompt = check_tokens(prompt, self.runner.decoder.config.vocab_size)
        if isinstance(params, SamplingParams) and params.truncate_prompt_tokens is not None:
            prompt = prompt[-params.truncate_prompt_tokens :]
        limit = self._check(prompt, params, cache_salt)
        loaded = None if adapter is None else self._adapters().find(adapter)
        if loaded is not None:
            # an adapter's keys and values are its own
            cache_salt = f"{loaded.salt}\0{cache_salt}"
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        if params.prompt_logprobs is not None:
            # logprobs need every prompt token to be read: a salt of its own keeps the prefix cache out
            cache_salt = secrets.token_hex(16)
        if grammar is None and params.grammar is not None:
            if self.grammars is None:
                raise InvalidInput("structured output is asked for, and the model has no tokenizer")
            grammar = self.grammars.compile(params.grammar)
        request = Request(self._count, prompt, params, limit, ends, cache_salt, adapter=loaded)
        if self.tokenizer is not None:
            request.tokenizer = self.tokenizer
            request.banned = banned_sequences(self.tokenizer, params.bad_words)
        self._count += 1
        answers = params.n
        if params.beam_width is not None:
            answers = params.beam_width
            request.search = BeamSearch(
                answers, limit, ends, params.length_penalty, params.early_stopping, least=params.min_tokens
            )
        request.needs_host = request.search is not None or any(len(sequence) > 1 for sequence in request.banned)
        seed = self._random.getrandbits(62) if params.seed is None else params.seed
        for n in range(answers):
            text = None if self.tokenizer is None or request.search is not None else Detokenizer(self.tokenizer, params, prompt)
            request.answers.append(Answer(request, n, seed + n, list(prompt), detokenizer=text))
            request.answers[-1].grammar = steering_of(
                prompt, params, None if grammar is None else grammar.fork(), ends=ends, tokenizer=self.tokenizer,
                vocabulary=self.runner.decoder.config.vocab_size, thoughts=self.thoughts, grammars=self.grammars,
            )  # fmt: skip
        names = emptied_by(request.answers[0], self.runner.decoder.config.vocab_size)
        if names is not None:
            raise InvalidInput(f"every token is forbidden where the answer begins, by {names}: allow another")
        self.scheduler.add(request)
        return request

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Reads an adapter; see `LLM.load_adapter`."""
        used = {request.adapter for request in (*self.scheduler.running, *self.scheduler.waiting) if request.adapter is not None}
        self._adapters().load(name, path, used)

    def unload_adapter(self, name: str) -> None:
        """Takes no more requests for an adapter; see `LLM.unload_adapter`."""
        self._adapters().unload(name)

    def _adapters(self) -> Adapters:
        if self.adapters is None:
            raise InvalidInput("the engine has no room for adapters: give max_adapters when it is made")
        return self.adapters

    def output_of(self, request: Request, prompt: str | None = None) -> RequestOutput:
        """Returns a request's state of this moment. One whose text cannot be made ends with an error, and no other does."""
        try:
            return output_of(request, prompt)
        except Exception as error:
            self._note_failure(request, error)
            return output_of(request, prompt)

    def abort(self, request: Request) -> None:
        """Ends a request; its answers keep the tokens that they have."""
        try:
            for answer in request.live:
                self._close(answer, "abort")
            self.scheduler.abort(request)
        except BaseException:
            self._abort_all()
            raise

    def step(self) -> list[Request]:
        """Runs a step; returns the requests that have got tokens or have ended.

        If it fails, whatever the error, all requests that run or wait are aborted, and the engine can be used again.
        """
        try:
            return self._run_step()
        except BaseException:
            self._abort_all()
            raise

    def check_idle(self) -> None:
        """Checks the books of an idle engine: no request holds a block or a slot, and the pool's counts agree.

        Raises:
            AssertionError: they do not; the sentence says what is lost.
        """
        held = self.pool.used_blocks
        assert not held, f"{held:,} of {self.pool.total:,} blocks of the KV cache are held, and no request runs: they have leaked"
        free = self.scheduler.free_slots
        assert free == self.max_answers, f"{self.max_answers - free} slots are held, and no request runs: they have leaked"
        self.pool.check()

    def _abort_all(self) -> None:
        """Ends all requests and forgets who owns which block, also what the prefix cache holds.

        A failed step may have left a block half owned, or listed one that it never wrote. No answer is freed by itself: that
        would rely on books which may be wrong.
        """
        self._in_flight = None
        for request in self.scheduler.reset():
            for answer in request.live:
                self._close(answer, "abort")

    def _note_failure(self, request: Request, error: Exception) -> None:
        """Ends a request that has met a mistake: it must not end the others."""
        logging.getLogger(__name__).error("request %d has failed", request.id, exc_info=error)
        self._fail(request, f"the request has failed: {type(error).__name__}: {error}")

    def _fail(self, request: Request, reason: str) -> None:
        """Ends one request for a reason of its own; the others go on."""
        request.error = reason
        for answer in request.live:
            # not closed like others: the answer's text may be what went wrong
            answer.finish_reason = "abort"
        self.scheduler.abort(request)

    def _run_step(self) -> list[Request]:
        changed: dict[int, Request] = {}
        plan = self.scheduler.schedule()
        launched = None
        if plan.work:
            launched = self.runner.run(plan)
            self.steps.update(steps=1, tokens=sum(work.tokens for work in plan.work))
        elif self._in_flight is None and not self.scheduler.idle:
            raise AssertionError("requests wait, none runs, and none can be admitted: this is a mistake in the scheduler")
        if self._in_flight is not None:
            self._collect_step(changed)
        self._in_flight = launched
        if self._in_flight is not None and not self._ahead:
            self._collect_step(changed)
        return list(changed.values())

    def _collect_step(self, changed: dict[int, Request]) -> None:
        """Waits for the step in flight and gives its tokens to the answers."""
        assert self._in_flight is not None
        result, self._in_flight = self._in_flight, None
        for answer, draft, tokens, tops in result.wait():
            request = answer.request
            answer.pending -= len(tokens)
            changed[request.id] = request
            if answer.finish_reason is not None:
                continue
            try:
                if draft:
                    self._take_draft(answer, draft, tokens, tops)
                else:
                    self._take_result(answer, tokens[0], None if tops is None else tops[0])
            except GrammarFailed as error:
                self._fail(request, str(error))
            except Exception as error:
                self._note_failure(request, error)
        for work, tops in result.prompt_tops():
            for place, top in enumerate(tops, work.start + 1):
                work.answer.request.prompt_tops[place] = top

    def _take_result(self, answer: Answer, token: int, top: Top | None) -> None:
        """Gives an answer the results of a step: a token, or in a search the candidates for one."""
        search = answer.request.search
        if search is None:
            if token == NOTHING:
                self._end_for_want_of_tokens(answer)
            else:
                self._take_token(answer, token, top)
            return
        assert top is not None
        answer.tops.append(top)
        if all(len(other.tops) for other in answer.request.answers):
            self._step_search(answer.request, search)

    def _take_draft(self, answer: Answer, draft: tuple[int, ...], tokens: list[int], tops: list[Top] | None) -> None:
        """Gives an answer the tokens of a step with a draft: those behind guesses that were drawn, and the first that was not."""
        accepted = next((n for n, (guess, token) in enumerate(zip(draft, tokens, strict=False)) if guess != token), len(draft))
        if answer.table is not None:
            # the rows behind it are written anew
            answer.planned -= len(draft) - accepted
        if self.speculator is not None:
            self.speculator.note(answer, len(draft), accepted)
        for n in range(accepted + 1):
            self._take_result(answer, tokens[n], None if tops is None else tops[n])
            if answer.finish_reason is not None:
                return

    def _take_token(self, answer: Answer, token: int, top: Top | None) -> None:
        """Adds a token to an answer, and ends the answer if the token does."""
        request = answer.request
        answer.ids.append(token)
        if top is not None:
            answer.tops.append(top)
            answer.logprob += top.logprob
        if token in request.ends:
            if answer.detokenizer is not None:
                answer.detokenizer.add_end(token)
            self._finish(answer, "stop", token if token in request.params.stop_token_ids else None)
            return
        if answer.detokenizer is not None:
            answer.detokenizer.add([token])
        if answer.grammar is not None:
            answer.grammar.take(token)
        stopped = answer.detokenizer is not None and answer.detokenizer.stopped is not None
        if stopped or (answer.grammar is not None and answer.grammar.over):
            self._finish(answer, "stop")
        elif answer.generated == request.limit:
            self._finish(answer, "length")
        elif answer.table is not None and len(answer.ids) // self.pool.size > answer.table.sealed:
            # behind what is planned there may be room, with keys of a draft that was refused
            self.scheduler.seal(answer, min(len(answer.ids), answer.planned))

    def _end_for_want_of_tokens(self, answer: Answer) -> None:
        """Ends an answer where no token could be drawn; what was asked of the answer may be the reason, or its logits."""
        names = emptied_by(answer, self.runner.decoder.config.vocab_size)
        if names is None:
            self._fail(answer.request, "no token can be drawn: the logits of every token that may come are NaN or -inf")
        else:
            self._finish(answer, "abort", f"every token is forbidden here, by {names}")

    def _step_search(self, request: Request, search: BeamSearch) -> None:
        """Advances a beam search by one token, once every beam has its candidates."""
        answers = request.answers
        going = search.step([answer.tops[0].ids for answer in answers], [answer.tops[0].logprobs for answer in answers])
        for answer in answers:
            answer.tops.clear()
        if not search.over:
            # while fewer beams go on than there are answers, the others follow the first, and the search looks at none of them
            going += [going[0]] * (len(answers) - len(going))
            ids = [[*answers[successor.parent].ids, successor.token] for successor in going]
            self.scheduler.fork_beams(answers, [successor.parent for successor in going])
            for answer, known in zip(answers, ids, strict=True):
                answer.ids = known
            return
        if not search.found:
            self._fail(request, "the beam search has found no answer: the logits of every token that it may take are NaN or -inf")
            return
        # a tiny vocabulary may leave fewer distinct answers than were asked for
        returned = answers[: min(request.params.n, len(search.found))]
        for answer, found in zip(returned, search.found, strict=False):
            answer.ids = [*request.prompt, *found.tokens]
            answer.logprob, answer.score = found.logprob, found.score
            answer.finish_reason = "stop" if found.tokens[-1] in request.ends else "length"
            if self.tokenizer is not None:
                answer.detokenizer = Detokenizer(self.tokenizer, request.params, request.prompt)
                answer.detokenizer.add(found.tokens[:-1] if answer.finish_reason == "stop" else found.tokens)
                answer.detokenizer.finish()
        for answer in answers[len(returned) :]:
            answer.finish_reason = "abort"
        self.scheduler.abort(request)
        request.answers = returned

    def _finish(self, answer: Answer, reason: FinishReason, stop: int | str | None = None) -> None:
        self._close(answer, reason, stop)
        self.scheduler.finish(answer)

    def _close(self, answer: Answer, reason: FinishReason, stop: int | str | None = None) -> None:
        """Ends an answer; the text held back so far may turn out to hold a stop string, which is then the reason."""
        text = answer.detokenizer
        if text is not None:
            text.finish()
            if text.stopped is not None:
                reason, stop = "stop", text.stopped
                kept = text.tokens_kept
                # a new list: outputs that callers hold share the old one
                answer.ids = answer.ids[: len(answer.request.prompt) + kept]
                answer.logprob -= sum(top.logprob for top in answer.tops[kept:])
                del answer.tops[kept:]
        answer.finish_reason = reason
        answer.stop_reason = stop

    def _check(self, prompt: list[int], params: SamplingParams, cache_salt: str) -> int:
        """Checks a request; returns the most tokens that an answer may have."""
        if not isinstance(params, SamplingParams):
            raise InvalidInput(f"the sampling parameters are {repr(params)[:40]}; must be SamplingParams")
        if not isinstance(cache_salt, str):
            raise InvalidInput(f"the salt is {repr(cache_salt)[:40]}; must be a string")
        params.check_vocabulary(self.runner.decoder.config.vocab_size)
        if params.stops and (self.tokenizer is None or params.beam_width is not None):
            why = "the model has no tokenizer" if self.tokenizer is None else "a beam search ends at tokens"
            raise InvalidInput(f"stop strings are asked for, and {why}: give stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise InvalidInput("bad_words are given, and the model has no tokenizer: give a logit_bias of -inf for their tokens")
        left = self.max_len - len(prompt)
        if left < 1:
            raise InvalidInput(
                f"the prompt has {len(prompt):,} tokens, and a sequence at most {self.max_len:,}, one of them for the answer: "
                f"shorten it, or raise max_model_len and num_blocks if the model allows"
            )
        # samples wait for one another, and the beams of a search run together
        together = params.beam_width or 1
        if together > self.max_answers:
            raise InvalidInput(f"{together} beams at once are asked for; at most {self.max_answers} run here (max_num_seqs)")
        limit = left if params.max_tokens is None else min(params.max_tokens, left)
        needed = self.scheduler.needed_by(len(prompt), limit, together)
        if needed > self.pool.total:
            more = f"{limit:,} of an answer" if together == 1 else f"{together} x {limit:,} of beams"
            raise InvalidInput(
                f"{len(prompt):,} tokens of prompt and {more} take {needed:,} blocks of "
                f"{self.pool.size}; the pool has {self.pool.total:,}: ask for fewer, or raise num_blocks"
            )
        return limit
