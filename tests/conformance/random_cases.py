"""Random small attention problems: any mask, any options, any lengths, as Cases."""

from __future__ import annotations

import random
from dataclasses import replace

from rooftile.exact.cases import Case
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Window


def draw_case(rng: random.Random) -> Case:
    """Draws a problem of at most 2 x 8 heads and 150 positions; most options are off more often than on."""
    group = rng.choice((1, 1, 2, 3, 5))
    Hk = rng.choice((1, 2))
    dim = rng.choice((1, 8, 16, 24, 32, 64, 80, 100))
    lengths = ()
    if rng.random() < 0.4:
        lengths = tuple((_length(rng), _length(rng)) for _ in range(rng.randint(1, 4)))
    bias = ""
    if rng.random() < 0.3:
        # a packed bias has one column per key
        always = "S" if lengths else ""
        bias = "".join(axis for axis in ("HTS" if lengths else "BHTS") if axis in always or rng.random() < 0.6)
    case = Case(
        name="random",
        tags=frozenset(),
        B=rng.randint(1, 2),
        T=_length(rng),
        S=_length(rng),
        H=group * Hk,
        Hk=Hk,
        dim=dim,
        dim_v=rng.choice((None, None, 16, 33)),
        dtype=rng.choice(("fp32", "fp32", "fp32", "bf16", "fp16")),
        mask=draw_mask(rng),
        lengths=lengths,
        scale=rng.choice((None, None, 0.3, -0.1)),
        softcap=rng.choice((0.0, 0.0, 0.0, 3.0)),
        dropout=rng.choice((0.0, 0.0, 0.0, 0.25)),
        bias=bias,
        alibi=rng.random() < 0.2,
        sinks=rng.random() < 0.2,
        strides=rng.choice(("contiguous", "transposed", "sliced")),
    )
    # if no row sees two keys, every gradient but dv is zero, and rounding remains that the definition does not have
    lonely = case.problem().pairs <= max(sum(t for t, _ in case.problem().sizes.sequences), 1)
    return replace(case, dtype="fp32", bias="") if lonely else case


def draw_mask(rng: random.Random) -> Mask:
    mask = FULL
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        mask = mask & rng.choice(
            (
                CAUSAL,
                CAUSAL,
                Window(rng.choice((None, 0, 3, 40)), rng.choice((None, 0, 7, 30))),
                Prefix(rng.randint(0, 90)),
                Chunk(rng.choice((1, 5, 16, 48, 64))),
            )
        )
    return mask


def _length(rng: random.Random) -> int:
    """Draws lengths, often near multiples of a tile."""
    return rng.choice((0, 1, 2, 17, 31, 32, 33, 63, 64, 65, 100, rng.randint(1, 150)))
