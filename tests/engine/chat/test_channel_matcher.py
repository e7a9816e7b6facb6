"""gpt-oss's thoughts are closed when their tokens are spent, and a grammar begins behind them: on masks, and in an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.chat.harmony.header import MARKS
from rooftile.engine.chat.harmony.reader import HarmonyReader
from rooftile.engine.chat.parts import CallStart, read_whole
from rooftile.engine.chat.thought_formats import HARMONY
from rooftile.engine.sampling.steering import Steering, allows
from rooftile.engine.sampling.thought_steering import steer_thoughts
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.errors import InvalidInput
from tests.engine.chat.test_thought_matcher import Letters
from tests.engine.folders import core
from tests.server.harmony import harmony_folder

SPARE = 5
PROMPT = "<|start|>user<|message|>Why?<|end|><|start|>assistant"
THINKS = "<|channel|>analysis<|message|>the stop string stops"
AGAIN = "<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    made = core("byte_level")
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return Tokenizer(made, named={"eos_token": "<|return|>"})


def steered(own: Tokenizer, *, budget: int | None = None, grammar: str | None = None, prompt: str = PROMPT) -> Steering:
    vocabulary = own.vocab_size + SPARE
    made = steer_thoughts(
        own, HARMONY, own.encode(prompt, special=False), vocabulary=vocabulary,
        ends=frozenset(own.encode("<|return|><|call|>", special=False)), budget=budget,
        grammar=None if grammar is None else Letters(own, grammar, vocabulary),
    )  # fmt: skip
    assert made is not None
    return made


def allowed(mask: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(made: Steering, own: Tokenizer, said: str | Sequence[int], most: int = 80, seed: int | None = None) -> list[int]:
    """The tokens of a model that says a text while it may; where it may not, or behind the text, any token with a seed."""
    wanted = own.encode(said, special=False) if isinstance(said, str) else [*said]
    draw, found = random.Random(seed), list[int]()
    while len(found) < most and not made.over and (wanted or seed is not None or len(allowed(made.mask)) == 1):
        may = allowed(made.mask)
        assert may
        token = wanted.pop(0) if wanted and allows(made.mask, wanted[0]) else may[0] if seed is None else draw.choice(may)
        # tokens that are free need not wait for one another: the mask holds for them all
        if made.free:
            assert len(may) == own.vocab_size + SPARE
        made.take(token)
        found.append(token)
    return found


def texts_of(own: Tokenizer, ids: list[int], prompt: str = "assistant") -> tuple[str, str]:
    answer = read_whole(HarmonyReader((), prompt), own.decode(ids, skip_special=False))
    return answer.thought, answer.content


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_budget_closes_the_thought(own: Tokenizer, budget: int) -> None:
    said = THINKS + " the stream of strings" * 9
    ids = walk(steered(own, budget=budget), own, said, most=60)
    head, text = (own.encode(each, special=False) for each in ("<|channel|>analysis<|message|>", said.rpartition("|>")[2]))
    closing = own.encode(f"{AGAIN}<|channel|>", special=False)
    assert ids[: len(head) + budget + len(closing)] == head + text[:budget] + closing
    # another channel is opened then
    assert ids[len(head) + budget + len(closing)] in {own.encode(word, special=False)[0] for word in ("final", "commentary")}


def test_several_thoughts_share_a_budget(own: Tokenizer) -> None:
    said = f"{THINKS}{AGAIN}<|channel|>commentary<|message|>ab{AGAIN}{THINKS}"
    spent = len(own.encode("the stop string stops", special=False))
    ids = walk(steered(own, budget=spent + 3), own, said + " of strings", most=120)
    text = own.decode(ids, skip_special=False)
    assert text.startswith(said.rpartition("the")[0])
    # the mark that ends the first thought is one of its tokens
    assert texts_of(own, ids)[0] == "the stop string stops\n\n" + own.decode(
        own.encode("the stop string stops", special=False)[:2]
    )


def test_a_budget_leaves_what_is_no_thought_alone(own: Tokenizer) -> None:
    for said in ("<|channel|>final<|message|>analysis " * 9, "<|channel|>analysis to=functions.add<|message|>{}" + "ab " * 20):
        assert walk(steered(own, budget=2), own, said, most=999) == own.encode(said, special=False)
    # no thought at all
    ids = walk(steered(own, budget=0), own, THINKS, most=3)
    assert not own.decode(ids, skip_special=False).startswith("<|channel|>a")


def test_free_tokens_need_not_wait(own: Tokenizer) -> None:
    """Whatever a model draws, the mask of a moment holds for as many tokens as it says."""
    for seed in range(40):
        draw = random.Random(seed)
        made = steered(own, budget=draw.randrange(9))
        words = [*own.encode("".join(MARKS), special=False)]
        words += own.encode("analysis", special=False) * 2 + own.encode("final commentary assistant", special=False)
        promised = 0
        for _ in range(60):
            may = allowed(made.mask)
            promised = max(promised - 1, made.free)
            assert promised <= 0 or len(may) == own.vocab_size + SPARE
            made.take(draw.choice([token for token in words if token in may] or may))
    made = steered(own, budget=3)
    walk(made, own, "<|channel|>final<|message|>a")
    assert made.free > 10**6


@pytest.mark.parametrize("said", [f"{THINKS}{AGAIN}<|channel|>final<|message|>cd 12", "<|channel|>final<|message|>cd 12"])
def test_a_grammar_is_the_final_message(own: Tokenizer, said: str) -> None:
    made = steered(own, grammar="cd 12")
    assert walk(made, own, said) == own.encode(said, special=False)
    assert made.over


CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"


@pytest.mark.parametrize("said", [f"{THINKS}{AGAIN}{CALL}", CALL])
def test_a_grammar_may_have_its_own_header(own: Tokenizer, said: str) -> None:
    made = steered(own, grammar=CALL)
    ids = walk(made, own, said)
    assert ids == own.encode(said, special=False)
    assert made.over
    assert CallStart(0, "add") in HarmonyReader(()).feed(own.decode(ids, skip_special=False))


@pytest.mark.parametrize("grammar", ["cd 12", CALL])
@pytest.mark.parametrize("budget", [None, 0, 4])
def test_random_models(own: Tokenizer, grammar: str, budget: int | None) -> None:
    """Whatever a model draws, there is one thought in its budget, and then the grammar's text."""
    for seed in range(12):
        made = steered(own, budget=budget, grammar=grammar)
        # a model without a budget ends its thought by itself
        ids = walk(made, own, "<|channel|>analysis<|message|>" if seed % 2 else "", most=9, seed=seed)
        ids += walk(made, own, "<|end|>", most=200, seed=seed)
        assert made.over, own.decode(ids, skip_special=False)
        text = own.decode(ids, skip_special=False)
        behind = grammar if grammar.startswith("<") else f"<|channel|>final<|message|>{grammar}"
        assert text.endswith(behind)
        if budget == 0:
            assert text == behind
        assert text.count("analysis<|message|>") <= 1


@pytest.mark.parametrize(
    ("turn", "said"), [("<|channel|>final<|message|>So", "cd 12"), ("<|channel|>analysis<|message|>So", f"ab{AGAIN}")]
)
def test_an_answer_that_is_continued(own: Tokenizer, turn: str, said: str) -> None:
    made = steered(own, grammar="cd 12", prompt=PROMPT + turn)
    ids = walk(made, own, said + "<|channel|>final<|message|>cd 12" * said.startswith("ab"))
    assert made.over
    assert own.decode(ids, skip_special=False).startswith(said)


def test_a_fork_changes_nothing_in_its_origin(own: Tokenizer) -> None:
    for options in ({"budget": 3}, {"grammar": CALL}, {"grammar": "cd 12", "budget": 2}):
        made, alone = steered(own, **options), steered(own, **options)
        for token in walk(steered(own, **options), own, f"{THINKS}{AGAIN}{CALL}", most=25):
            ahead = made.fork()
            for _ in range(4):
                if not ahead.over:
                    ahead.take(allowed(ahead.mask)[0])
            assert (made.mask == alone.mask).all()
            made.take(token)
            alone.take(token)


def test_a_mark_must_be_a_token() -> None:
    with pytest.raises(InvalidInput, match=r"the tokenizer has no token <\|start\|>"):
        steered(Tokenizer(core("byte_level")), budget=3)


def test_an_engine_follows(tmp_path: Any) -> None:
    pytest.importorskip("llguidance")
    llm = LLM(harmony_folder(tmp_path / "tiny"), device="cpu", num_blocks=100, max_model_len=512)
    ask = [{"role": "user", "content": "the stop"}]
    for chance in ({"temperature": 0}, {"seed": 5}):
        params = SamplingParams(
            max_tokens=80, n=2, thinking_token_budget=6, structured={"choice": ["yes", "no, never"]}, **chance
        )  # fmt: skip
        (output,) = llm.chat(ask, params)
        for answer in output.outputs:
            assert answer.content in ("yes", "no, never")
            assert answer.finish_reason == "stop"
    bias = dict.fromkeys(llm.get_tokenizer().encode("<|channel|>analysis<|message|>", special=False), 100.0)
    free = SamplingParams(max_tokens=60, temperature=0, thinking_token_budget=4, ignore_eos=True, logit_bias=bias)
    assert llm.chat(ask, free)[0].outputs[0].text
