"""Text that is decoded when it is read is the text of a detokenizer that decodes each token when it comes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from tokenizers import decoders, models

from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text import incremental_decoder
from rooftile.engine.text.detokenizer import Detokenizer
from rooftile.engine.text.tokenizer import Tokenizer
from tests.engine.folders import KINDS, SPECIAL, TEXTS, save
from tests.engine.test_detokenizer import chunks, stream

# a stop string that no stream has: it makes a detokenizer decode each token when it comes
NEVER = "\U0010fffd\U0010fffd"


@cache
def made(kind: str) -> Tokenizer:
    return Tokenizer.from_folder(save(kind, Path(mkdtemp())))


def read(text: Detokenizer, what: str) -> object:
    """Reads one of the things that a detokenizer tells."""
    return text.snapshot().read() if what == "snapshot" else text.take() if what == "take" else getattr(text, what)


WHAT = ["text", "snapshot", "take", "tokens_released", "tokens_kept"]


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(seed=st.integers(0, 2**32), skip=st.booleans(), follows=st.booleans(), at_once=st.sampled_from([4, 9, 256]))
def test_whatever_is_read_and_whenever(kind: str, seed: int, skip: bool, follows: bool, at_once: int) -> None:
    tokenizer, draw = made(kind), random.Random(seed)
    ids = [id for _ in range(draw.randrange(1, 6)) for id in stream(tokenizer, draw)]
    lazy = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    eager = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip, stop=NEVER))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incremental_decoder, "AT_ONCE", at_once)
        if follows:
            lazy.follow()
            eager.follow()
        for part in chunks(ids, draw):
            lazy.add(part)
            eager.add(part)
            for what in draw.sample(WHAT, draw.choice([0, 0, 0, 1, 5])):
                assert read(lazy, what) == read(eager, what), (what, ids)
        lazy.finish()
        eager.finish()
        for what in draw.sample(WHAT, 5):
            assert read(lazy, what) == read(eager, what), (what, ids)
    assert lazy.text == tokenizer.decode(ids, skip)


def test_a_token_without_a_text_at_the_end_is_not_within_the_text() -> None:
    core = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "##": 3}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece(cleanup=False)
    for count in range(4):
        text = Detokenizer(Tokenizer(core), SamplingParams())
        text.add([1, 2, 1, 2, 2] + [3] * count)
        assert (text.text, text.tokens_released) == ("ab abb", 5)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ids each decode is given."""
    handed: list[int] = []
    decode = Tokenizer.decode

    def noted(self: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> str:
        handed.append(len(ids))
        return decode(self, ids, skip_special)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    return handed


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_decoded_before_it_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode(TEXTS[2] * 9, special=False)
    handed = counted(monkeypatch)
    text = Detokenizer(tokenizer, SamplingParams())
    for id in ids:
        text.add([id])
    assert text.tokens_kept == len(ids)
    text.finish()
    assert handed == []
    assert text.text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "cleaned"])
@pytest.mark.parametrize("end", ["text", "half"])
def test_a_long_answer_that_is_read_at_its_end_takes_few_decodes(kind: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(kind)
    # tokens of half a character stand in most places; those of a byte, and those without a text, are decoded one by one
    ids = tokenizer.encode(" the roof is " * 500 + ("日本語" * 500 if kind == "byte_level" else "tiled"), special=False)
    if end == "half":
        ids += tokenizer.encode("😀", special=False)[:-1]
    due = tokenizer.decode(ids)
    handed = counted(monkeypatch)
    text = Detokenizer(tokenizer, SamplingParams())
    text.add(ids)
    text.finish()
    assert text.text == due
    # each token is decoded about once, in windows of a bounded length
    assert len(ids) <= sum(handed) < 1.3 * len(ids) + 100
    assert len(handed) < len(ids) / 20
    assert max(handed) <= incremental_decoder.AT_ONCE + 2 * incremental_decoder.SPAN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [1, 2, 3])
def test_a_few_tokens_that_are_read_take_no_more_decodes_than_one_each(
    kind: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode("the roof is tiled 😀 " * 20, special=False)
    handed, decodes = counted(monkeypatch), {}
    for stop in (None, NEVER):
        handed.clear()
        text = Detokenizer(tokenizer, SamplingParams(stop=stop))
        for start in range(0, len(ids), together):
            text.add(ids[start : start + together])
            text.take()
        decodes[stop] = len(handed)
    assert 0 < decodes[None] <= decodes[NEVER]
    if kind == "byte_level" and together == 3:
        assert decodes[None] < 0.8 * decodes[NEVER]


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_that_is_read_at_its_end_is_linear(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, draw = made(kind), random.Random(3)
    raw = [id for id in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.text_of(id)] or [1]
    answers = {
        "raw": draw.choices(raw, k=4000),
        "silent": tokenizer.encode(SPECIAL[1], special=False)[-1:] * 4000,
        "bytes and text": (list(tokenizer.byte_ids)[65:67] + tokenizer.encode("roof", special=False)) * 900,
    }
    handed = counted(monkeypatch)
    for name, ids in answers.items():
        handed.clear()
        text = Detokenizer(tokenizer, SamplingParams())
        text.add(ids)
        text.finish()
        assert text.text is not None
        assert sum(handed) <= (100 if tokenizer.cleans_up else 14) * len(ids) + 100, name


def test_ids_that_are_taken_are_decoded_elsewhere() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("naïve 😀", special=False)
    here, there = Detokenizer(tokenizer, SamplingParams()), Detokenizer(tokenizer, SamplingParams())
    taken = []
    for id in ids:
        here.add([id])
        taken.append(here.take_ids())
        there.add(taken[-1])
    here.finish()
    assert taken == [[id] for id in ids]
    assert here.take_ids() == []
    assert (here.text, there.text) == ("", "naïve 😀")
    with pytest.raises(AssertionError, match="stop strings"):
        Detokenizer(tokenizer, SamplingParams(stop="x")).take_ids()
