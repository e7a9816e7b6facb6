"""A bad word is banned in every spelling that its tokenizer has for it, wherever it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Core
from tokenizers import pre_tokenizers

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.text.prompt import banned_sequences
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.engine.asking import ROOM, assert_clean
from tests.engine.folders import KINDS, core, save
from tests.models.checkpoints import SMALL, saved

WORDS = ["the", "stop", "abcd", "Grüße", "roof", "12", "stops the", "a tile", "Don't stop!", "ab", "bcd", "END", "!", "#"]
BEFORE = ["", " ", "the ", "stop  ", "\n", "12\n", "cab ", "cab. ", "cab.", "(", '"', "ab", "x"]


def made(kind: str) -> Core:
    """Returns a tokenizer of a kind, with spaces put before a text or not."""
    name, _, how = kind.partition(", ")
    found = core(name)
    if how == "a space put before":
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif how:
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=how)
    return found


ALL = [*KINDS, "byte_level, a space put before", "unigram, first", "unigram, never"]


@pytest.mark.parametrize("kind", ALL)
def test_every_spelling_is_caught(kind: str) -> None:
    """Wherever a word begins with a token of its own; how the word was written makes no difference."""
    theirs = made(kind)
    tokenizer, caught = Tokenizer(theirs), 0
    for word in WORDS:
        banned = banned_sequences(tokenizer, [word])
        for written in (" " + word, "  " + word, word + " ", f"\n{word}\n"):
            assert banned_sequences(tokenizer, [written]) == banned
        for before in BEFORE:
            found = theirs.encode(before + word, add_special_tokens=False)
            own = {start for start, end in found.offsets if end > start}
            if len(before) in own or (before.endswith(" ") and len(before) - 1 in own):
                places = range(1, len(found.ids) + 1)
                hits = [end for end in places for ids in banned if tuple(found.ids[max(0, end - len(ids)) : end]) == ids]
                assert hits, (word, before, found.tokens, banned)
                caught += 1
    assert caught > 100


@pytest.mark.parametrize("kind", ALL)
def test_nothing_else_is_caught(kind: str) -> None:
    """Each sequence spells the word, with a space or without; none of them ends with another."""
    tokenizer = Tokenizer(made(kind))
    for word in WORDS:
        sequences = banned_sequences(tokenizer, [word])
        for ids in sequences:
            spelt = "".join(tokenizer.token(id) for id in ids if id not in tokenizer.byte_ids)
            for mark in ("▁", "Ġ", "##", "[UNK]"):
                spelt = spelt.replace(mark, "")
            letters = [letter for letter in spelt if letter.isascii() and letter.isalnum()]
            assert letters == [letter for letter in word if letter.isascii() and letter.isalnum()][-len(letters) :]
            assert not any(ids != other and ids[-len(other) :] == other for other in sequences)


def test_white_space_is_a_word_too() -> None:
    """A line's end was banned together with a plain space."""
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = Tokenizer(core(kind))
        for word in ("\n", "\t"):
            (ids,) = banned_sequences(tokenizer, [word])
            assert tokenizer.decode([tokenizer.encode("a", special=False)[-1], *ids]) == "a" + word
    with pytest.raises(InvalidInput, match=r"bad_words has ' ', for which the tokenizer has no token; leave it out"):
        banned_sequences(Tokenizer(core("wordpiece")), [" "])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer like Llama 2's."""
    path = tmp_path_factory.mktemp("llama2")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 330, "initializer_range": 0.2})
    saved(transformers.AutoModelForCausalLM.from_config(config), path)
    return save("byte_fallback", path)


@pytest.mark.parametrize("word", ["stop", " stop", "  stop"])
def test_a_word_within_a_text(word: str, folder: Path) -> None:
    """`▁stop` came back with bad_words=[" stop"], which is encoded to two spaces and `stop`."""
    llm = LLM(folder, **ROOM)
    tokenizer = llm.get_tokenizer()
    (token,) = tokenizer.encode("stop", special=False)
    assert tokenizer.token(token) == "▁stop"
    pushed = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logit_bias": {token: 100.0}}
    assert llm.generate("cab", SamplingParams(**pushed))[0].outputs[0].token_ids == [token] * 12
    (answer,) = llm.generate("cab", SamplingParams(**pushed, bad_words=[word]))[0].outputs
    assert token not in answer.token_ids
    assert len(answer.token_ids) == 12
    assert_clean(llm)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_word_that_begins_in_the_prompt(ahead: bool, folder: Path) -> None:
    """Its last token is banned from the first step on, also after a preemption."""
    llm = LLM(folder, **ROOM)
    llm.engine._ahead = ahead
    tokenizer = llm.get_tokenizer()
    word, prompt = "ab the stop", "cde ab the"
    *begun, last = tokenizer.encode(word, special=False)
    assert tokenizer.encode(prompt)[-len(begun) :] == begun
    pushed = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logit_bias": {last: 100.0}}
    free, banned, other = llm.generate(
        [prompt, prompt, "cde the"], [SamplingParams(**pushed), *[SamplingParams(**pushed, bad_words=[word])] * 2]
    )
    assert free.outputs[0].token_ids == other.outputs[0].token_ids == [last] * 5
    assert banned.outputs[0].token_ids[0] != last
    assert last in banned.outputs[0].token_ids
