"""Serving users from pages: candidates scored and events appended, beside a model that reads each history anew.

    score-BxMxN    M candidates of each of B users with N events are read behind the history
    append-BxN     one more event of each of B users with N events
    clicks-BxMxN   M candidates of target attention against each of B users with N events
    small          all of them, for a CPU

The model has two HSTU layers with 4 heads of 128, without times; for clicks it is one target attention (DIN) of these heads.
Contestants are "rooftile" (pages of the model's dtype), "fp8" and "int8" pages, and "anew": the packed model over all histories
and candidates, with which a user's states, or scores of clicks, are compared first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import clock_for
from rooftile.recommend import HSTU, HSTURecommender, Scorer, TargetRecommender
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import contest, refused, times_of, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import floor_of, tidy

GPU = ("score-1x512x8192", "score-8x512x8192", "append-64x8192", "clicks-8x512x8192")
CPU = ("small",)
QUICK = ("score-8x512x8192",)
ITEMS, MORE = 10_000, 2048
FORMATS = {"rooftile": "auto", "fp8": "fp8", "int8": "int8"}
# the most that states may differ from the packed model's, in norm
CLOSE = {"rooftile": 3e-2, "anew": 3e-2, "fp8": 0.15, "int8": 8e-2}


class Problem(NamedTuple):
    """A model, users' events and candidates."""

    model: HSTURecommender | TargetRecommender
    events: Tensor  # (B, N)
    candidates: Tensor  # (B, M)

    @property
    def users(self) -> range:
        return range(len(self.events))


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant."""
    clock = clock_for(session.device, 60.0)
    for name in names:
        say(name)
        kind, _, sizes = name.partition("-")
        dims = (2, 16, 3, 5, 40) if kind == "small" else (4, 128, *_sizes(kind, sizes))
        for phase in ("score", "append", "clicks") if kind == "small" else (kind,):
            torch.manual_seed(0)
            problem = problem_of(phase, *dims, session.device, DTYPES[session.dtype])
            scorers = {who: filled(problem, word) for who, word in FORMATS.items()}
            works: dict[str, Callable[[], Any]] = {who: partial(CALLS[phase], scorer, problem) for who, scorer in scorers.items()}
            works["anew"] = partial(anew, problem, phase)
            why = {who: refusal(who, scorer, problem) for who, scorer in scorers.items()}
            works = {who: work for who, work in works.items() if not why.get(who)}
            roofs = {who: roof_of(who, problem, phase, scorers, session) for who in works}
            words: dict[str, Any] = {"suite": "scorer", "case": name, "phase": phase}
            yield from compared(contest(session, works, clock, roofs=roofs, **words), scorers).values()
            yield from refused(session, why, before="refused: ", dtype=session.dtype, **words)
            del problem, scorers, works
            tidy(session.device)


def _sizes(kind: str, sizes: str) -> tuple[int, int, int]:
    """Users, candidates and events of a case."""
    numbers = [int(n) for n in sizes.split("x")]
    return (numbers[0], numbers[1], numbers[2]) if kind != "append" else (numbers[0], 1, numbers[1])


def problem_of(phase: str, heads: int, dim: int, B: int, M: int, N: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Draws a model whose tables are not zero, and users."""
    events, candidates = (torch.randint(ITEMS, (B, n), device=device) for n in (N, M))
    if phase == "clicks":
        clicks = TargetRecommender(ITEMS, dim=heads * dim, heads=heads, weights="silu", device=device).eval()
        with torch.no_grad():
            for parameter in clicks.parameters():
                # as they are drawn, scores are all near 0.5 and tell nothing about pages
                parameter.mul_(4)
        return Problem(clicks.to(dtype), events, candidates)
    model = HSTURecommender(ITEMS, dim=heads * dim, heads=heads, layers=2, longest=N + MORE, buckets=0, device=device).eval()
    for layer in layers_of(model):
        assert layer.position_table is not None
        torch.nn.init.normal_(layer.position_table, std=0.1)
    return Problem(model.to(dtype), events, candidates)


def layers_of(model: HSTURecommender) -> list[HSTU]:
    return [layer for layer in model.layers if isinstance(layer, HSTU)]


def filled(problem: Problem, kv_dtype: str) -> Scorer:
    """A scorer that has read the users, with room for further events."""
    B, N = problem.events.shape
    head = None if isinstance(problem.model, TargetRecommender) else lambda states: states.float().sum(-1)
    scorer = Scorer(problem.model, room=B * (N + MORE), head=head, kv_dtype=kv_dtype)
    scorer.append_many(list(zip(problem.users, problem.events, strict=True)))
    return scorer


def score(scorer: Scorer, problem: Problem) -> list[Tensor]:
    return scorer.score_many(list(zip(problem.users, problem.candidates, strict=True)))


def append(scorer: Scorer, problem: Problem) -> None:
    """Appends an event of each user; of one whose room is used up, all are read again."""
    assert isinstance(problem.model, HSTURecommender)
    if scorer.histories.length(0) + 1 > problem.model.longest:
        scorer.clear()
        scorer.append_many(list(zip(problem.users, problem.events, strict=True)))
    scorer.append_many([(user, [int(user)]) for user in problem.users])


CALLS: dict[str, Callable[[Scorer, Problem], Any]] = {"score": score, "append": append, "clicks": score}


def anew(problem: Problem, phase: str) -> Tensor:
    """States of the packed model over all histories, with candidates behind them or without; of clicks their scores."""
    B, N = problem.events.shape
    if isinstance(problem.model, TargetRecommender):
        with torch.no_grad():
            return problem.model.scores(
                problem.events.flatten(), torch.arange(B + 1, device=problem.events.device) * N, problem.candidates
            )
    rows = problem.events if phase == "append" else torch.cat([problem.events, problem.candidates], dim=1)
    n = rows.shape[1]
    cu = torch.arange(B + 1, device=rows.device) * n
    with torch.no_grad():
        states: Tensor = problem.model(rows.flatten(), cu, targets=None if phase == "append" else n - N)
    return states.view(B, n, -1)[:, N:]


def refusal(who: str, scorer: Scorer, problem: Problem) -> str:
    """Says how candidates' states or scores differ from the model's; "" if they do not."""
    ask, word = (scorer.score, "scores") if isinstance(problem.model, TargetRecommender) else (scorer.candidate_states, "states")
    found = ask(0, problem.candidates[0])
    first = problem._replace(events=problem.events[:1], candidates=problem.candidates[:1])
    due = anew(first, "score")[0]
    worst = float((found.double() - due.double()).norm() / due.double().norm())
    return "" if worst <= CLOSE[who] else f"{word} are {worst:.1e} off the model's; may be {CLOSE[who]:.0e}"


def roof_of(who: str, problem: Problem, phase: str, scorers: dict[str, Scorer], session: Session) -> Any:
    """The products with the histories and the bytes of the pages; anew all pairs' products, and keys and values once."""
    B, N = problem.events.shape
    M = problem.candidates.shape[1]
    model = problem.model
    width = model.dim if isinstance(model, TargetRecommender) else sum(x.heads * x.head_dim for x in layers_of(model))
    rows = 1 if phase == "append" else M
    if who == "anew":
        pairs = (0 if phase == "clicks" else N * (N + 1) // 2) + (0 if phase == "append" else M * (N + 1))
        return floor_of(4 * B * pairs * width, 4 * B * N * width * model.embedding.weight.element_size(), *_rates(session))
    books = scorers[who].histories
    return floor_of(4 * B * rows * N * width, sum(books.nbytes(user) for user in problem.users), *_rates(session))


def _rates(session: Session) -> tuple[Any, str]:
    return session.ceilings, session.dtype


def compared(rows: dict[str, Row], scorers: dict[str, Scorer]) -> dict[str, Row]:
    """The rows with the time of reading anew over their own, and the bytes that an event takes."""
    us, found = times_of(rows), dict(rows)
    for who, scorer in scorers.items():
        if who in us and "anew" in us:
            books = scorer.histories
            more = {"of_anew_ratio": us["anew"] / us[who], "bytes_per_event": books.block_bytes / books.pool.size}
            found[who] = with_measures(rows[who], **more)
    return found
