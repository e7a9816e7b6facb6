"""The text of an answer is what the tokenizer decodes for prompt and answer together, without the prompt's text."""

from __future__ import annotations

import random
from itertools import pairwise

import hypothesis
import hypothesis.strategies as st
import pytest

from rooftile.engine.requests.request import Answer, Request
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.border import prompt_text
from rooftile.engine.text.detokenizer import Detokenizer
from rooftile.engine.text.tokenizer import Tokenizer
from tests.engine.continuations import KINDS, text_before, tokenizer_of
from tests.engine.folders import SPECIAL
from tests.engine.test_detokenizer import chunks, oracle, stream

# a stop string that no text has: it makes a detokenizer decode each token when it comes
NEVER = "\U0010fffd\U0010fffd"
WORDS = [
    " world", "hello", "  return x", "\n    if", "日本", "é", "😀", " .", "n't", " ' ", "a", "##", "\ufffd", *SPECIAL, " the",
]  # fmt: skip
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=8).map("".join)


def text_of(tokenizer: Tokenizer, prompt: list[int], parts: list[list[int]], skip: bool, **params: object) -> str:
    """The text of an answer in these parts; what is returned early stays."""
    text = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip, **params), prompt)
    text.follow()
    given = []
    for part in parts:
        text.add(part)
        given.append(text.take())
    text.finish()
    given.append(text.take())
    assert text.text == "".join(given)
    begins = text._decoder.begins
    assert len(begins) == sum(map(len, parts))
    # spaces that are removed may shorten a text below where its last token began
    most = len(text.text) + 3 * tokenizer.cleans_up
    assert all(a <= b <= most for a, b in pairwise([0, *begins])), begins
    return text.text


def check(tokenizer: Tokenizer, prompt: list[int], ids: list[int], draw: random.Random, skip: bool) -> bool:
    """Checks the text of an answer however it is read; returns whether the prompt's text stays as it was."""
    whole, before = tokenizer.decode([*prompt, *ids], skip), text_before(tokenizer, prompt, skip)
    assert prompt_text(tokenizer, prompt, skip) == before
    ways = [[ids], [[id] for id in ids], chunks(ids, draw)]
    found = [text_of(tokenizer, prompt, parts, skip) for parts in ways]
    found.append(text_of(tokenizer, prompt, [ids], skip, stop=NEVER))
    assert len(set(found)) == 1, (prompt, ids, found)
    if not whole.startswith(before):
        return False
    assert found[0] == whole[len(before) :], (prompt, ids)
    return True


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=20)
@hypothesis.given(text=texts, more=texts, skip=st.booleans(), seed=st.integers(0, 2**32))
def test_every_cut_of_a_text(kind: str, text: str, more: str, skip: bool, seed: int) -> None:
    tokenizer, draw = tokenizer_of(kind), random.Random(seed)
    for ids in (tokenizer.encode(text + more), tokenizer.encode(text) + tokenizer.encode(more, special=False)):
        for cut in range(len(ids) + 1):
            # what a character or a space before punctuation turns into is known when its last token is
            stays = check(tokenizer, ids[:cut], ids[cut:], draw, skip)
            assert stays or tokenizer.cleans_up or (tokenizer.byte_ids and "\ufffd" in tokenizer.decode(ids, skip))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("rounds", [80, pytest.param(1500, marks=pytest.mark.sweep)])
def test_bytes_that_are_no_text(kind: str, skip: bool, rounds: int) -> None:
    tokenizer, draw, stays = tokenizer_of(kind), random.Random(7), 0
    for _ in range(rounds):
        ids = stream(tokenizer, draw)
        cut = draw.randrange(len(ids) + 1)
        stays += check(tokenizer, ids[:cut], ids[cut:], draw, skip)
    # in the others bytes of the answer have made U+FFFD of whole characters of the prompt, or spaces have gone
    assert stays > (0.5 if tokenizer.cleans_up else 0.8) * rounds


@pytest.mark.parametrize(
    ("kind", "prompt", "more", "due"),
    [
        ("byte_fallback", "hello", "▁the", " the"), ("no_bytes", "hello", "▁world", " world"),
        ("metaspace_first", "hello", "▁world", " world"), ("no_prefix", "hello", "▁world", " world"),
        ("unigram", "the", "▁stop", " stop"), ("no_bytes", "f:\n", "▁▁▁▁", "    "), ("no_bytes", "", "▁world", "world"),
    ],
)  # fmt: skip
def test_the_first_token_keeps_its_space_behind_a_prompt(kind: str, prompt: str, more: str, due: str) -> None:
    tokenizer = tokenizer_of(kind)
    id = tokenizer._core.token_to_id(more)
    ids = tokenizer.encode(prompt)
    assert text_of(tokenizer, ids, [[id]], True) == due
    # a special token of a chat template between them changes nothing, and one alone does not begin a text
    special = tokenizer._core.token_to_id(SPECIAL[2])
    assert text_of(tokenizer, [*ids, special], [[id]], True) == due
    assert text_of(tokenizer, [special], [[id]], True) == tokenizer.decode([id])


def test_a_character_that_the_prompt_begins_belongs_to_the_answer() -> None:
    for kind in ("byte_level", "byte_fallback", "no_prefix", "metaspace_first"):
        tokenizer = tokenizer_of(kind)
        ids = tokenizer.encode("ab日本😀")
        for cut in range(3, len(ids)):
            before = prompt_text(tokenizer, ids[:cut], True)
            assert "\ufffd" not in before
            assert before + text_of(tokenizer, ids[:cut], [[id] for id in ids[cut:]], True) == "ab日本😀"


def test_a_broken_byte_behind_a_prompt_of_bytes_is_one_sign() -> None:
    """Decode would turn every byte of the prompt into U+FFFD; the prompt's characters are whole, and stay."""
    tokenizer = tokenizer_of("byte_fallback")
    broken = {byte: id for id, byte in tokenizer.byte_ids.items()}[0xFF]
    assert text_of(tokenizer, tokenizer.encode("a" + "日本" * 50), [[broken]], True) == "\ufffd"


@pytest.mark.parametrize("kind", ["no_bytes", "byte_fallback", "unigram", "byte_level"])
def test_a_stop_string_that_begins_with_a_space(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the stop the")
    cut = next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]) == "the")
    for stop, due in ((" stop", ""), (" the", " stop")):
        text = Detokenizer(tokenizer, SamplingParams(stop=stop), ids[:cut])
        text.add(ids[cut:])
        assert (text.text, text.stopped) == (due, stop)


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.settings(max_examples=40)
@hypothesis.given(text=texts, more=texts, seed=st.integers(0, 2**32))
def test_stop_strings_are_found_in_the_text_behind_the_prompt(kind: str, text: str, more: str, seed: int) -> None:
    tokenizer, draw = tokenizer_of(kind), random.Random(seed)
    prompt, ids = tokenizer.encode(text), tokenizer.encode(more, special=False)
    cut = draw.randrange(len(ids) + 1)
    prompt, ids = prompt + ids[:cut], ids[cut:]
    whole = text_of(tokenizer, prompt, [ids], True)
    hypothesis.assume(whole)
    start = draw.randrange(len(whole))
    params = SamplingParams(stop=[whole[start : start + draw.randrange(1, 4)], " the"], include_stop=draw.random() < 0.5)
    hypothesis.assume(not any(tokenizer.spells_special(stop) for stop in params.stops))
    due = oracle(whole, params)
    for parts in ([ids], [[id] for id in ids]):
        found = Detokenizer(tokenizer, params, prompt)
        for part in parts:
            found.add(part)
        found.finish()
        assert (found.text, found.stopped) == due
        # what is kept has the text, and with one token less it has not
        kept = found.tokens_kept
        assert text_of(tokenizer, prompt, [ids[:kept]], True).startswith(found.text) or "\ufffd" in whole or tokenizer.cleans_up
        if kept and "\ufffd" not in whole and not tokenizer.cleans_up:
            assert len(text_of(tokenizer, prompt, [ids[: kept - 1]], True).rstrip("\ufffd")) < len(found.text)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("cleaned", "word_ends")])
@pytest.mark.parametrize("skip", [True, False])
@hypothesis.settings(max_examples=40)
@hypothesis.given(text=texts, cut=st.integers(0, 30))
def test_pieces_of_tokens_join_to_the_text(kind: str, skip: bool, text: str, cut: int) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    cut = min(cut, len(ids))
    request = Request(0, ids[:cut], SamplingParams(skip_special_tokens=skip), 10**6, frozenset(), tokenizer=tokenizer)
    answer = Answer(request, 0, 0, ids)
    raw = b""
    for place, id in enumerate(ids):
        piece = answer.text_at(place)(id)
        if not tokenizer.is_silent(id, skip):
            raw += tokenizer.bytes_of(id) if "\ufffd" in piece else piece.encode()
    assert raw.decode(errors="replace") == tokenizer.decode(ids, skip)


def test_nothing_of_the_prompt_is_decoded_before_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then only its end, however long it is."""
    tokenizer, handed = tokenizer_of("byte_fallback"), []
    decode = Tokenizer.decode

    def noted(self: Tokenizer, ids: list[int], skip_special: bool = True) -> str:
        handed.append(len(ids))
        return decode(self, ids, skip_special)

    ids = tokenizer.encode("the stop " * 1000)
    monkeypatch.setattr(Tokenizer, "decode", noted)
    read = []
    silent = Tokenizer.is_silent
    monkeypatch.setattr(Tokenizer, "is_silent", lambda *given: read.append(1) or silent(*given))
    by_byte = {byte: id for id, byte in tokenizer.byte_ids.items()}
    for prompt in (ids, tokenizer.encode("日本" * 1000), [by_byte[0x80]] * 5000, [by_byte[0xE6]] * 5000):
        handed.clear()
        read.clear()
        text = Detokenizer(tokenizer, SamplingParams(), prompt)
        text.add(ids[1:5])
        assert handed == []
        assert text.text
        assert sum(handed) < 1000
        assert len(read) < 400
