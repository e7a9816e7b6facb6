"""`Draft`: guessed tokens of one answer, which the model reads behind its last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rooftile.engine.requests.request import Answer
from rooftile.engine.sampling.grammar import GrammarFailed


class Draft(NamedTuple):
    """Guessed tokens, and for an answer with a grammar the mask of what may follow each of them."""

    tokens: tuple[int, ...] = ()
    masks: tuple[npt.NDArray[np.int32], ...] = ()


NO_DRAFT = Draft()


def cut(answer: Answer, tokens: Sequence[int]) -> Draft:
    """Returns the first tokens of a guess with which the answer can go on: up to an end, and as far as its grammar has them."""
    kept: list[int] = []
    for token in tokens:
        if token in answer.request.ends:
            break
        kept.append(token)
    if answer.grammar is None:
        return Draft(tuple(kept)) if kept else NO_DRAFT
    masks: list[npt.NDArray[np.int32]] = []
    ahead = answer.grammar.fork()
    for token in kept:
        if not ahead.mask[token >> 5] >> (token & 31) & 1:
            break
        try:
            ahead.take(token)
        except GrammarFailed:
            break
        if ahead.over:
            # the answer ends with this token, which the row before it gives
            break
        masks.append(ahead.mask)
    return Draft(tuple(kept[: len(masks)]), tuple(masks)) if masks else NO_DRAFT
