"""Text that comes piece by piece is the text of all tokens, up to the stop that an oracle finds in it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.detokenizer import Detokenizer
from rooftile.engine.text.tokenizer import Tokenizer
from tests.engine.folders import CORPUS, KINDS, SPECIAL, TEXTS, save

STOPS = [
    ["stop"], ["stop", "stops", "st"], ["abcd", "bc"], ["b", "ab"], ["aab"], ["😀"], ["👩‍👧", "é"], [" the", "e"], ["\n\n"],
    ["<|end|>"], ["d|>a"], ["a<|end|>", "<|user|>"], ["<|end|><|end|>", "<|end|>t"], ["\ufffd"], ["\ufffd\ufffdx", "\ufffd "],
    [" "], [" . ", "n't"], ["Don't stop!", "."], ["aa", "aaaa"],
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: Tokenizer.from_folder(save(kind, tmp_path_factory.mktemp(kind))) for kind in KINDS}


def stream(tokenizer: Tokenizer, draw: random.Random) -> list[int]:
    """Ids of texts, of bytes that are no text, of special tokens and of none, cut and put together at random."""
    ids: list[int] = []
    raw = [id for id in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([id], False)]
    runs = list(tokenizer.byte_ids) or raw or [0]
    for _ in range(draw.randrange(1, 9)):
        match draw.randrange(8):
            case 0:
                ids += draw.choices(runs, k=draw.randrange(1, 9))
            case 1:
                ids += draw.choices(range(tokenizer.vocab_size + 5), k=draw.randrange(1, 5))
            case 2:
                ids += tokenizer.encode(draw.choice(SPECIAL), special=False)
            case 3:
                emoji = tokenizer.encode(draw.choice(["😀", "👩‍👩‍👧é", "日本語", "a😀b€"]), special=False)
                ids += emoji[: draw.randrange(1, len(emoji) + 1)]
            case 4:
                ids += tokenizer.encode(draw.choice(["aab", "a ' b", "aaaa", " . ", "n't 's", "the stop"]), special=False)
            case _:
                text = tokenizer.encode(draw.choice(CORPUS + TEXTS), special=draw.random() < 0.2)
                start = draw.randrange(len(text) + 1)
                ids += text[start : start + draw.randrange(1, 12)]
    return ids


def chunks(ids: list[int], draw: random.Random) -> list[list[int]]:
    cuts = sorted(draw.choices(range(len(ids) + 1), k=draw.randrange(len(ids) + 1)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def run(tokenizer: Tokenizer, params: SamplingParams, parts: Sequence[list[int]]) -> tuple[Detokenizer, list[str]]:
    """A detokenizer at the end of an answer, and what it gave; checks that it never took anything back."""
    text, given = Detokenizer(tokenizer, params), []
    text.follow()
    for part in parts:
        text.add(part)
        given.append(text.take())
        assert text.text == "".join(given)
        if text.stopped is not None:
            text.add(part)
            assert text.take() == ""
            break
    text.finish()
    given.append(text.take())
    text.finish()
    assert text.take() == ""
    assert text.text == "".join(given)
    return text, given


def oracle(text: str, params: SamplingParams) -> tuple[str, str | None]:
    """Finds the stop string that ends first, and the longest of those that end together."""
    for end in range(1, len(text) + 1):
        for stop in sorted(params.stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if params.include_stop else end - len(stop)], stop
    return text, None


def shown(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str, bool]]:
    """Characters of text without special tokens, and between them the spellings of these, which are not in the text."""
    found: list[tuple[str, bool]] = []
    text = ""
    for place, id in enumerate(ids, 1):
        ends = place == len(ids) or ids[place] not in tokenizer.byte_ids
        now = tokenizer.decode(ids[:place]) if ends else text
        now = now if place == len(ids) else now.rstrip("\ufffd")
        found += [(character, True) for character in now[len(text) :]]
        text = max(now, text, key=len)
        if id in tokenizer._special_ids:
            found += [(character, False) for character in tokenizer.token(id)]
    return found


def oracle_of_special(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> tuple[str, str | None]:
    """The same, where a stop string with a special token in it is searched among all characters, and others in the text."""
    stream = shown(tokenizer, ids)
    for end in range(1, len(stream) + 1):
        every = "".join(character for character, _ in stream[:end])
        text = "".join(character for character, visible in stream[:end] if visible)
        for stop in sorted(params.stops, key=len, reverse=True):
            special = any(spelt in stop for spelt in SPECIAL)
            if not (every if special else text).endswith(stop) or not (special or stream[end - 1][1]):
                continue
            start = end - len(stop)
            kept = "".join(character for character, visible in stream[:start] if visible) if special else text[: -len(stop)]
            return kept + (stop if params.include_stop else ""), stop
    return text if stream else "", None


# few in `make test`, many in `make test-sweep`
rounds = pytest.mark.parametrize("rounds", [250, pytest.param(1000, marks=pytest.mark.sweep)])


@rounds
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_random_streams(tokenizers: dict[str, Tokenizer], kind: str, skip: bool, rounds: int) -> None:
    tokenizer, draw, params = tokenizers[kind], random.Random(1), SamplingParams(skip_special_tokens=skip)
    broken = 0
    for _ in range(rounds):
        ids = stream(tokenizer, draw)
        text, _ = run(tokenizer, params, chunks(ids, draw))
        assert text.text == tokenizer.decode(ids, skip), ids
        assert (text.stopped, text.tokens_kept) == (None, len(ids))
        broken += "\ufffd" in text.text
    assert broken > 20 or kind == "wordpiece"


@rounds
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_random_stops(tokenizers: dict[str, Tokenizer], kind: str, skip: bool, include: bool, rounds: int) -> None:
    tokenizer, draw, found = tokenizers[kind], random.Random(2), set()
    for _ in range(rounds):
        ids = stream(tokenizer, draw)
        whole = tokenizer.decode(ids, skip)
        stops = list(draw.choice(STOPS))
        if whole and draw.random() < 0.5:
            start = draw.randrange(len(whole))
            stops.append(whole[start : start + draw.randrange(1, 9)])
        params = SamplingParams(stop=stops, include_stop=include, skip_special_tokens=skip)
        text, _ = run(tokenizer, params, chunks(ids, draw))
        if skip and any(spelt in stop for stop in stops for spelt in SPECIAL):
            # where a character is torn by a special token, or spaces go, the two are not told apart
            if "\ufffd" not in whole and not tokenizer.cleans_up:
                assert (text.text, text.stopped) == oracle_of_special(tokenizer, ids, params), (ids, stops)
        else:
            assert (text.text, text.stopped) == oracle(whole, params), (ids, stops)
        found.add(text.stopped)
    assert len(found) > 30


@rounds
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_of_a_special_token_that_never_comes_changes_nothing(
    tokenizers: dict[str, Tokenizer], kind: str, rounds: int
) -> None:
    tokenizer, draw, same = tokenizers[kind], random.Random(6), 0
    for _ in range(rounds):
        ids = stream(tokenizer, draw)
        whole = tokenizer.decode(ids)
        text, _ = run(tokenizer, SamplingParams(stop=["<|end|>\x00", "x<|user|>\x00"]), chunks(ids, draw))
        assert (text.stopped, text.tokens_kept) == (None, len(ids))
        # bytes behind a special token that make a run no UTF-8 change what decode writes for those before it
        same += text.text == whole
        assert text.text == whole or "\ufffd" in whole, ids
    assert same > 0.95 * rounds


@rounds
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_kept(tokenizers: dict[str, Tokenizer], kind: str, include: bool, rounds: int) -> None:
    """Text of what is kept has all of the kept text, and with one token less it has not."""
    tokenizer, draw, seen = tokenizers[kind], random.Random(3), 0
    for _ in range(rounds):
        ids = [id for id in stream(tokenizer, draw) if id not in tokenizer.byte_ids or draw.random() < 0.5]
        whole = tokenizer.decode(ids)
        # half characters are counted with the token after them, and cleaning takes spaces away behind: see below
        if not whole or "\ufffd" in whole or tokenizer.cleans_up:
            continue
        start = draw.randrange(len(whole))
        params = SamplingParams(stop=whole[start : start + draw.randrange(1, 5)], include_stop=include)
        text, _ = run(tokenizer, params, chunks(ids, draw))
        kept = text.tokens_kept
        assert text.stopped
        assert tokenizer.decode(ids[:kept]).startswith(text.text)
        if kept:
            before = tokenizer.decode(ids[: kept - 1])
            assert len(before.rstrip("\ufffd")) < len(text.text)
            seen += 1
        else:
            assert text.text == ""
    assert seen > 40 or tokenizer.cleans_up


def test_tokens_kept_in_a_run_of_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    """A run is read when it has ended, and its tokens are told apart all the same."""
    tokenizer = tokenizers["byte_fallback"]
    ids = tokenizer.encode("ab€😀日c", special=False)
    special = tokenizer.encode("<|end|>", special=False)[-1]
    assert [id in tokenizer.byte_ids for id in ids] == [False] * (len(ids) - 11) + [True] * 10 + [False]
    before = len(ids) - 11
    for stop, kept in (("€", before), ("😀", before + 3), ("日", before + 7), ("c", before + 10)):
        assert run(tokenizer, SamplingParams(stop=stop), [ids])[0].tokens_kept == kept
        included = {"€": 3, "😀": 4, "日": 3, "c": 1}[stop]
        assert run(tokenizer, SamplingParams(stop=stop, include_stop=True), [ids])[0].tokens_kept == kept + included
    # a special token inside of a character and one after it
    torn = [*ids[: before + 1], special, *ids[before + 1 : before + 3], special, *ids[before + 3 :]]
    assert run(tokenizer, SamplingParams(stop="😀"), [torn])[0].tokens_kept == before + 4
    assert run(tokenizer, SamplingParams(stop="日"), [torn])[0].tokens_kept == before + 9
    # at the very beginning decode takes a space away; bytes that are no text are a character each
    by_byte = {byte: id for id, byte in tokenizer.byte_ids.items()}
    assert run(tokenizer, SamplingParams(stop="A"), [[by_byte[b] for b in b" A"]])[0].tokens_kept == 0
    text, _ = run(tokenizer, SamplingParams(stop="B"), [[by_byte[b] for b in b" AB"]])
    assert (text.text, text.tokens_kept) == ("A", 2)
    broken = [*(by_byte[b] for b in b"\xff\xfe\xfd"), *ids[-1:], by_byte[33]]
    text, _ = run(tokenizer, SamplingParams(stop="!"), [broken])
    assert (text.text, text.tokens_kept) == ("���c", 4)
    text, _ = run(tokenizer, SamplingParams(stop="��c"), [broken])
    assert (text.text, text.tokens_kept) == ("�", 1)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_what_is_held_back(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """No more than may still change."""
    tokenizer = tokenizers[kind]
    text = Detokenizer(tokenizer, SamplingParams(stop=["abcx", "##"]))

    def given(part: str) -> list[str]:
        return [taken([id]) for c in part for id in tokenizer.encode("\n" + c, special=False)[len(line) :]]

    def taken(ids: list[int]) -> str:
        text.add(ids)
        return text.take()

    line = tokenizer.encode("\n", special=False)
    assert given("tabcabca") == ["t", "", "", "", "abc", "", "", "abc"]
    assert given("b#!") == ["", "ab", "#!"]
    # a run of bytes may be no text yet; of UTF-8 alone no more than a character waits
    if kind == "byte_level":
        assert given("😀b") == ["", "", "", "😀", "b"]
    else:
        assert given("😀b") == ["", "", "", "", "😀b"]
    assert taken(tokenizer.encode("\n😀", special=False)[len(line) :][:2]) == ""
    text.finish()
    assert text.take() == ("\ufffd" if kind == "byte_level" else "\ufffd\ufffd")


def test_earliest_of_a_chunk_and_ties(tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["byte_level"].encode("xx abcd stop stops", special=False)
    for stops, kept, stop in (
        (["stop", "abcd"], "xx ", "abcd"),
        (["abcd", "bc"], "xx a", "bc"),
        (["c", "bc", "abc"], "xx ", "abc"),
        (["stops"], "xx abcd stop ", "stops"),
    ):
        for parts in ([ids], [[id] for id in ids]):
            text, _ = run(tokenizers["byte_level"], SamplingParams(stop=stops), parts)
            assert (text.text, text.stopped) == (kept, stop)


def test_no_stop_within_min_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, draw = tokenizers["byte_level"], random.Random(4)
    ids = [tokenizer.encode("a", special=False)[0]] * 20
    for least in range(20):
        for stop in ("a", "aa", "aaa"):
            text, _ = run(tokenizer, SamplingParams(stop=stop, min_tokens=least, max_tokens=None), chunks(ids, draw))
            # the stop is complete with the first token that may end the answer, and begins with the answer at least
            assert text.text == "a" * max(0, least + 1 - len(stop))
            assert text.tokens_kept == len(text.text)
    text, _ = run(tokenizer, SamplingParams(stop="a", min_tokens=20, max_tokens=None), chunks(ids, draw))
    assert (text.text, text.stopped) == ("a" * 20, None)


def test_no_stop_within_min_tokens_of_a_run(tokenizers: dict[str, Tokenizer]) -> None:
    """Whose text comes later than its tokens."""
    tokenizer = tokenizers["byte_fallback"]
    by_byte = {byte: id for id, byte in tokenizer.byte_ids.items()}
    ids = [by_byte[byte] for byte in b"ABAB"]
    for least, due in ((0, ""), (1, "AB"), (2, "AB"), (3, "ABAB")):
        assert run(tokenizer, SamplingParams(stop="A", min_tokens=least), [ids])[0].text == due


def test_a_long_run_that_is_held_back_is_not_cut(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["cleaned"]
    for repeats in range(1, 20):
        ids = tokenizer.encode("the " + "日本語" * repeats + "abab . stop" * 9, special=False)
        assert run(tokenizer, SamplingParams(), [[id] for id in ids])[0].text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_however_long_the_answer(
    tokenizers: dict[str, Tokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in ids that are decoded, for texts, long runs of bytes and bytes that are no text."""
    tokenizer, draw, handed = tokenizers[kind], random.Random(5), []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> str:
        handed.append(len(ids))
        return decode(self, ids, skip_special)

    raw = [id for id in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([id], False)] or [1]
    answers = {
        "text": [id for _ in range(400) for id in stream(tokenizer, draw)],
        "raw": draw.choices(raw, k=4000),
        "a run": tokenizer.encode("日本語" * 500, special=False),
        "runs": tokenizer.encode("日本語日本語日本語a" * 200, special=False),
        "special": tokenizer.encode(SPECIAL[1] * 2000, special=False),
    }
    monkeypatch.setattr(Tokenizer, "decode", counted)
    most = 100 if tokenizer.cleans_up else 12
    for name, ids in answers.items():
        handed.clear()
        run(tokenizer, SamplingParams(stop="no such"), [ids])
        assert sum(handed) <= most * len(ids) + 100, name
        # nor is one step dear, but the one that ends a run
        longest = max(len(run) for run in "".join("x" if id in tokenizer.byte_ids else " " for id in ids).split(" "))
        assert max(handed, default=0) <= most + longest * (2 if tokenizer.cleans_up else 1), name


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_at_all(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    for stop in ("x", None):
        text = Detokenizer(tokenizers[kind], SamplingParams(stop=stop))
        text.add([])
        text.finish()
        assert (text.take(), text.text, text.tokens_kept, text.tokens_released) == ("", "", 0, 0)
    with pytest.raises(AssertionError):
        text.add([1])
