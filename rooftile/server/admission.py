"""`Admission`: how many requests and prompt tokens may wait. What is too much is refused at once, in this process."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rooftile.server.limits import LONGEST_RETRY_S
from rooftile.server.refusals import Refusal, retry_later

# the rate of the queue is measured over this many answers that left it
REMEMBERED = 64


@dataclass(slots=True)
class Ticket:
    """A request that was admitted. It counts as waiting until it starts, and as its key's until it is over."""

    admission: Admission
    key: str
    answers: int
    tokens: int
    waits: bool = True
    lives: bool = True

    def start(self) -> None:
        """Notes that the model begins to read the request's prompt."""
        if self.waits:
            self.waits = False
            self.admission.note_started(self)

    def end(self) -> None:
        """Notes that the request is over, in whatever way; a second time changes nothing."""
        if self.lives:
            self.lives = False
            if self.waits:
                self.waits = False
                self.admission.forget_waiting(self)
            self.admission.forget_running(self)


class Admission:
    """Counts waiting answers and tokens, and refuses more than the limits.

    Args:
        max_waiting: answers that may wait for each engine; each of n, best_of or beams counts.
        max_waiting_tokens: prompt tokens that may wait for each engine.
        max_per_key: prompts of one key that may wait or run; None for any number.
        now: a clock.
    """

    def __init__(
        self, max_waiting: int, max_waiting_tokens: int, max_per_key: int | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_per_engine = max_waiting, max_waiting_tokens
        self.engines = 1
        """How many engines take requests."""
        self.max_per_key = max_per_key
        self.waiting = 0
        self.tokens = 0
        self.refused = Counter[str]()
        """How many requests were refused, by reason."""
        self._per_key = Counter[str]()
        self._now = now
        self._started: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)

    @property
    def max_waiting(self) -> int:
        """How many answers may wait now."""
        return self._most_per_engine[0] * self.engines

    @property
    def max_waiting_tokens(self) -> int:
        """How many prompt tokens may wait now."""
        return self._most_per_engine[1] * self.engines

    @property
    def running(self) -> int:
        """Prompts that wait or run."""
        return self._per_key.total()

    def check_room(self, key: str) -> None:
        """Refuses a request while the queue is full; asked before its body is read.

        Raises:
            Refusal: with status 429 and the seconds after which to try again.
        """
        if self.waiting >= self.max_waiting:
            raise self._refuse("queue_full", f"{self.waiting:,} answers wait, as many as may (--max-waiting)")
        if self.tokens >= self.max_waiting_tokens:
            what = f"the queue holds {self.tokens:,} prompt tokens, as many as may wait (--max-waiting-tokens)"
            raise self._refuse("queue_full", what)
        if self.max_per_key is not None and self._per_key[key] >= self.max_per_key:
            what = f"{self._per_key[key]:,} prompts of this key wait or run, as many as may (--max-per-key)"
            raise self._refuse("key_limit", what)

    def admit(self, key: str, prompts: Sequence[tuple[int, int]]) -> list[Ticket]:
        """Admits a request with all of its prompts, or refuses it if it would be too much.

        Args:
            key: the name of the client's key.
            prompts: for each prompt, how many answers and how many prompt tokens it has.

        Raises:
            Refusal: with status 429; or 400 if the request would not even fit into an empty queue.
        """
        self.check_room(key)
        answers, tokens = (sum(each) for each in zip(*prompts, strict=True))
        for name, size, held, most, flag in (
            ("answers", answers, self.waiting, self.max_waiting, "--max-waiting"),
            ("prompt tokens", tokens, self.tokens, self.max_waiting_tokens, "--max-waiting-tokens"),
        ):
            if size > most:
                raise Refusal("invalid_value", f"the request has {size:,} {name}; the queue has room for {most:,} ({flag})")
            if held + size > most:
                what = f"the queue holds {held:,} {name} and the request has {size:,}; {most:,} may wait ({flag})"
                raise self._refuse("queue_full", what)
        self._check_key(key, len(prompts))
        self.waiting += answers
        self.tokens += tokens
        self._per_key[key] += len(prompts)
        return [Ticket(self, key, *each) for each in prompts]

    def _check_key(self, key: str, prompts: int) -> None:
        """Refuses a request with which its key would have too many prompts."""
        held, most = self._per_key[key], self.max_per_key
        if most is None:
            return
        if prompts > most:
            raise Refusal("invalid_value", f"the request has {prompts:,} prompts; a key may have {most:,} (--max-per-key)")
        if held + prompts > most:
            what = f"{held:,} prompts of this key wait or run and the request has {prompts:,}; {most:,} may (--max-per-key)"
            raise self._refuse("key_limit", what)

    def retry_s(self) -> int:
        """Returns the seconds in which half of the queue will have gone, by the rate of late; from 1 to 60."""
        if len(self._started) < 2:
            return 1
        seconds = max(self._now() - self._started[0][0], 1e-3)
        rate = sum(answers for _, answers in self._started) / seconds
        return min(LONGEST_RETRY_S, max(1, round(self.waiting / 2 / rate)))

    def note_started(self, ticket: Ticket) -> None:
        """Takes a request out of the queue that the model begins to read."""
        self.forget_waiting(ticket)
        self._started.append((self._now(), ticket.answers))

    def forget_waiting(self, ticket: Ticket) -> None:
        """Takes a request out of the queue that will never run."""
        self.waiting -= ticket.answers
        self.tokens -= ticket.tokens

    def forget_running(self, ticket: Ticket) -> None:
        """Takes a request that is over from its key's account."""
        self._per_key[ticket.key] -= 1
        if not self._per_key[ticket.key]:
            del self._per_key[ticket.key]

    def _refuse(self, code: str, what: str) -> Refusal:
        self.refused[code] += 1
        seconds = self.retry_s()
        return retry_later(code, f"{what}; try again in {seconds} s", seconds)
