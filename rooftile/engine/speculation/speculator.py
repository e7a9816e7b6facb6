"""`Speculator`: the drafts of an engine's answers.

A draft is a guess of the tokens that follow. The model reads it behind the answer's last token, each of them in a row of its own,
as if several answers had come so far: each row attends to the rows before it, and a token is drawn from each. A row's draw is
kept while all guesses before it were what was drawn. Since a draw is a function of logits, seed and position alone (see
`rooftile.engine.sampling.sampler`), the answer gets the very tokens that it would get without drafts: with a guess that is one
token, to take a draw if it equals the guess is rejection sampling, and accepts it as often as any rule can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rooftile.engine.requests.request import Answer, Request
from rooftile.engine.speculation.draft import NO_DRAFT, Draft, cut
from rooftile.engine.speculation.drafter import Drafter
from rooftile.engine.speculation.forecast import Forecast
from rooftile.engine.speculation.ngrams import Guesser, NgramIndex
from rooftile.engine.speculation.pace import Pace, SteadyPace
from rooftile.engine.speculation.settings import Speculation


class Speculator:
    """Drafts for the answers of one engine, and learns from what becomes of the drafts.

    Args:
        settings: what is asked for.
        forecast: what pays on this machine.
        most_rows: the most tokens that all answers read together in a step with drafts.
        drafter: the draft model; None for look-up.
    """

    def __init__(self, settings: Speculation, forecast: Forecast, most_rows: int, drafter: Drafter | None = None) -> None:
        self.settings, self.forecast, self.most_rows, self.drafter = settings, forecast, most_rows, drafter
        self.counts = Counter[str]()
        """How many tokens were "drafted", how many of them "accepted", in how many "drafts"."""
        self.guesser: type[Guesser] = NgramIndex
        """What guesses for an answer: made with the shortest and the longest n-gram."""
        self.most = 0
        """How many tokens at most are drafted for an answer in this step; 0 where drafts do not pay."""

    def forget(self) -> None:
        """Forgets what became of drafts so far."""
        self.counts.clear()
        self.forecast.forget()

    def begin_step(self, running: list[Request], budget: int) -> None:
        """Decides how long drafts may be in the next step.

        Args:
            running: the requests that run.
            budget: the most tokens that the step reads.
        """
        lengths = [answer.planned for request in running for answer in request.answers if answer.slot >= 0]
        answers, settings = max(1, len(lengths)), self.settings
        room = min(self.most_rows, budget) // answers - 1
        if room < 1:
            self.most = 0
        elif settings.max_batch is not None:
            self.most = min(room, settings.tokens) if answers <= settings.max_batch else 0
        else:
            self.most = min(room, self.forecast.most(answers, sum(lengths), settings.tokens))

    def draft(self, answer: Answer) -> Draft:
        """Returns a draft for an answer; it may be one whose last token has yet to come, and then waits for it.

        With a draft model it has placeholders, which `complete` replaces.
        """
        request, params = answer.request, answer.request.params
        if not self.most or not params.speculative or request.search is not None:
            return NO_DRAFT
        if answer.pace is None:
            answer.pace = Pace(self.settings.tokens) if self.drafter is None else SteadyPace(self.settings.tokens)
        pace, known = answer.pace, answer.generated + answer.pending
        # the last token that is due needs no guess: a row gives it in any case
        count = min(self.most, pace.length, request.limit - known - 1)
        if count < 1 or pace.pauses(known):
            return NO_DRAFT
        if self.drafter is not None:
            return Draft((-1,) * count) if self.drafter.can(answer, count) else NO_DRAFT
        if answer.guesser is None:
            answer.guesser = self.guesser(self.settings.shortest, self.settings.longest)
        found = cut(answer, answer.guesser.guess(answer.ids, count))
        if pace.waits and not found.tokens:
            pace.note(1, 0, known)
        pace.waits = bool(found.tokens and answer.pending)
        return found

    def complete(self, asked: Sequence[tuple[Answer, int]], entries: Mapping[tuple[int, int], int]) -> dict[Answer, Draft]:
        """Has the draft model guess; returns the drafts that take the place of those with placeholders; none for look-up.

        Args:
            asked: answers, and how many tokens there is room for in the draft of each.
            entries: new entries of the block tables on the device.
        """
        if self.drafter is None or not asked:
            return {}
        guesses = self.drafter.guess(asked, entries)
        drafts = {answer: NO_DRAFT for answer, _ in asked}
        for answer, tokens in guesses.items():
            drafts[answer] = cut(answer, tokens)
            if not drafts[answer].tokens and answer.pace is not None:
                answer.pace.note(1, 0, answer.generated)
        return drafts

    def note(self, answer: Answer, drafted: int, accepted: int) -> None:
        """Takes notice of what became of a draft; the answer has not got the tokens yet."""
        self.counts.update(drafted=drafted, accepted=accepted, drafts=1)
        self.forecast.note(drafted, accepted)
        if self.drafter is not None:
            self.drafter.note(answer, drafted, accepted)
        if answer.pace is not None:
            answer.pace.note(drafted, accepted, answer.generated + accepted + 1)
