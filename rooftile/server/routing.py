"""Routing: which engine answers a prompt. The choice follows from what is known of each engine, and from nothing else.

An engine that has the blocks of a prompt's beginning need not read it again. So the engine with most of them is chosen, unless it
is ahead of its share of the tokens by more than it would save; otherwise the less loaded of two engines is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# an engine with a prompt's blocks may hold this multiple of its share of the tokens, and the tokens that it saves on top
FAIR = 1.25
# tokens that an answer counts for beside its prompt, whose length is not known
ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Known:
    """An engine, as far as it is known when a prompt is routed.

    Args:
        load: tokens of the requests that it holds, which wait or run.
        cached: tokens of the prompt's beginning whose blocks it has.
    """

    load: int
    cached: int = 0


def choose(engines: Sequence[Known], turn: int) -> int:
    """Returns the place of the engine that shall answer a prompt; the same for the same arguments.

    Args:
        engines: the engines that answer requests, at least one.
        turn: the number of requests before this one; it says which two engines are looked at.

    Example:
        >>> choose([Known(load=300, cached=64), Known(load=280)], turn=0), choose([Known(900, 64), Known(280)], turn=0)
        (0, 1)
    """
    most = max(each.cached for each in engines)
    saved = most - min(each.cached for each in engines)
    if saved:
        best = min((place for place, each in enumerate(engines) if each.cached == most), key=lambda place: engines[place].load)
        if engines[best].load <= FAIR * sum(each.load for each in engines) / len(engines) + saved:
            return best
    return min(looked_at(len(engines), turn), key=lambda place: engines[place].load)


def looked_at(count: int, turn: int) -> tuple[int, int]:
    """Returns the places of the two engines that are looked at; each comes first once in `count` turns, beside others."""
    first = turn % count
    return first, (first + 1 + turn // count % (count - 1)) % count if count > 1 else first


def weight(prompt_tokens: int, answers: int) -> int:
    """Returns the tokens that a request counts for in its engine's load."""
    return prompt_tokens + ANSWER_TOKENS * answers
