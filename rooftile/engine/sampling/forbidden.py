"""The tokens that an answer may not have next, on the host.

A request forbids tokens by a list of allowed ones, by bad words, by biases of -inf, by a grammar, and by the least length of an
answer, which no end token may undercut. The device applies all of them. Where nothing is left the sampler says so, and
`emptied_by` tells which of them it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rooftile.engine.requests.request import Answer


def banned_next(answer: Answer, before: int, drafted: Sequence[int] = ()) -> list[int]:
    """Returns the tokens that may not come next: ends below min_tokens, and those that would complete a bad word.

    A bad word may have begun in the prompt.

    Args:
        answer: the answer; where a bad word has several tokens, all of the answer's are known.
        before: how many tokens the answer has before the next one, those in flight and those drafted included.
        drafted: tokens that are taken to follow those of the answer.
    """
    request = answer.request
    found = [*request.ends] if before < request.params.min_tokens else []
    if request.banned:
        longest = max(map(len, request.banned))
        ids = [*answer.ids[-longest:], *drafted]
        found += [last for *start, last in request.banned if ids[len(ids) - len(start) :] == start]
    return found


def emptied_by(answer: Answer, vocabulary: int) -> str | None:
    """Names what forbids every token that might come next; returns None if some token is left.

    Args:
        answer: the answer, with all of its tokens known.
        vocabulary: the number of the model's tokens.
    """
    params = answer.request.params
    banned = banned_next(answer, answer.generated)
    never = [token for token, bias in (params.logit_bias or {}).items() if bias == -math.inf]
    if params.allowed_token_ids is None and answer.grammar is None and len({*banned, *never}) < vocabulary:
        return None
    left = np.full(vocabulary, params.allowed_token_ids is None)
    left[list(params.allowed_token_ids or ())] = True
    left[banned + never] = False
    if answer.grammar is not None:
        left &= np.unpackbits(answer.grammar.mask.view(np.uint8), bitorder="little")[:vocabulary] != 0
    if left.any():
        return None
    names = {
        "allowed_token_ids": params.allowed_token_ids is not None, "bad_words": answer.request.banned,
        "logit_bias": never, "min_tokens": answer.generated < params.min_tokens, "structured": params.structured is not None,
        "tools": params.calls is not None,
        "thinking_token_budget": params.grammar is None and answer.grammar is not None,
    }  # fmt: skip
    *others, last = [name for name, there in names.items() if there]
    return f"{', '.join(others)} and {last}" if others else last
