"""No answer has a token that its request forbids, in any combination; where nothing is left, that is said."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rooftile.engine.async_engine import AsyncEngine
from rooftile.engine.llm import LLM
from rooftile.engine.requests.output import CompletionOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput
from tests.engine.asking import ROOM, assert_clean
from tests.models.checkpoints import SMALL, saved

LETTERS, END, AB = "abcdefgh", 8, 9
# two logits more than the tokenizer has tokens
VOCABULARY = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with so few tokens that masks leave none."""
    path = tmp_path_factory.mktemp("few")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": VOCABULARY, "eos_token_id": END, "initializer_range": 0.3})
    saved(transformers.AutoModelForCausalLM.from_config(config), path)
    known = {letter: id for id, letter in enumerate(LETTERS)} | {"<e>": END, "ab": AB}
    made = Tokenizer(models.BPE(known, [("a", "b")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<e>"])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>").save_pretrained(path)
    return path


def spelt(word: str) -> list[int]:
    """Returns the tokens of a word."""
    parts = word.split("ab")
    return [id for n, part in enumerate(parts) for id in [AB] * (n > 0) + [LETTERS.index(letter) for letter in part]]


def text_of(ids: list[int]) -> str:
    return "".join("ab" if id == AB else LETTERS[id] if id < END else "" for id in ids)


def may(token: int, params: SamplingParams, prompt: list[int], own: list[int]) -> bool:
    """Whether a request allows a token after these of the prompt and its own: the definition."""
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return False
    if (params.logit_bias or {}).get(token) == -math.inf:
        return False
    ends = {*params.stop_token_ids} | ({END} if not params.ignore_eos else set())
    if len(own) < params.min_tokens and token in ends:
        return False
    for word in params.bad_words:
        ids = spelt(word)
        if [*prompt, *own, token][-len(ids) :] == ids:
            return False
    if params.structured is None:
        return True
    choices, said = params.structured["choice"], text_of(own)
    if token == END:
        return said in choices
    return token not in (10, 11) and any(choice.startswith(said + text_of([token])) for choice in choices)


def some_words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices(LETTERS[:5], k=rng.choice([1, 1, 2, 2, 3]))) for _ in range(count)]


def drawn(rng: random.Random) -> SamplingParams:
    """Returns a random combination of masks with other parameters."""
    tokens = range(VOCABULARY)
    fields: dict = {"n": rng.choice([1, 1, 3]), "seed": rng.randrange(1000), "max_tokens": 8}
    fields["logprobs"] = rng.choice([None, 2])
    if rng.random() < 0.7:
        values = (-math.inf, -math.inf, -100.0, 100.0, 3.0)
        fields["logit_bias"] = {token: rng.choice(values) for token in rng.sample(tokens, rng.randrange(1, 6))}
    if rng.random() < 0.3:
        fields["structured"] = {"choice": some_words(rng, rng.randrange(1, 4))}
    else:
        fields["ignore_eos"] = rng.random() < 0.3
        fields["stop_token_ids"] = rng.sample(tokens, rng.randrange(3))
        fields["min_tokens"] = rng.choice([0, 1, 3])
        if rng.random() < 0.7:
            fields["allowed_token_ids"] = rng.sample(tokens, rng.randrange(1, 4))
        fields["bad_words"] = some_words(rng, rng.choice([0, 3, 12, 30]))
        if rng.random() < 0.2:
            # few tokens, of which few may follow one another
            few = rng.sample(range(2, 8), 2)
            pairs = [LETTERS[one] + LETTERS[other] for one in few for other in few]
            fields["allowed_token_ids"], fields["bad_words"] = few, rng.sample(pairs, 3)
    for name, values in (
        ("temperature", (0.0, 1.0, 3.0)), ("top_k", (0, 1, 3)), ("top_p", (1.0, 0.5)), ("min_p", (0.0, 0.2)),
        ("presence_penalty", (0.0, 1.5)), ("repetition_penalty", (1.0, 1.4)), ("frequency_penalty", (0.0, -1.0)),
    ):  # fmt: skip
        fields[name] = rng.choice(values)
    return SamplingParams(**fields)


def check(answer: CompletionOutput, prompt: list[int], params: SamplingParams) -> str:
    """Checks each token of an answer, and that an answer which was cut short could not go on; returns why it ended."""
    own = answer.token_ids
    for n, token in enumerate(own):
        assert may(token, params, prompt, own[:n]), (params, prompt, own, n)
    assert answer.finish_reason is not None
    if answer.finish_reason == "abort":
        assert str(answer.stop_reason).startswith("every token is forbidden here, by ")
        assert not any(may(token, params, prompt, own) for token in range(VOCABULARY))
    if params.logprobs is not None:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(own)
    return answer.finish_reason


@pytest.mark.parametrize("ahead", [False, True])
def test_no_combination_lets_a_forbidden_token_through(ahead: bool, folder: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    llm = LLM(folder, **ROOM | {"max_num_seqs": 40})
    llm.engine._ahead = ahead
    rng = random.Random(ahead)
    asked = [([rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 5))], drawn(rng)) for _ in range(250)]
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    ended: dict[str, int] = {}
    for (prompt, params), output in zip(asked, outputs, strict=True):
        if output.error is None:
            for answer in output.outputs:
                reason = check(answer, prompt, params)
                ended[reason] = ended.get(reason, 0) + 1
            assert any(may(token, params, prompt, []) for token in range(VOCABULARY))
        else:
            # refused where it can be known, and nowhere else
            assert not any(may(token, params, prompt, []) for token in range(VOCABULARY)), (output.error, params)
            ended["refused"] = ended.get("refused", 0) + 1
    assert min(ended.get(each, 0) for each in ("refused", "abort", "stop", "length")) > 9, ended
    assert_clean(llm)


# two tokens are allowed, and none of them after the first
STUCK = {"allowed_token_ids": [2, 3], "bad_words": ["cc", "cd", "dc", "dd"], "max_tokens": 6}
SENTENCE = "every token is forbidden here, by allowed_token_ids and bad_words"


def test_the_reason_is_told_by_all(folder: Path) -> None:
    """By LLM and AsyncEngine, whole and in a stream; the other answers go on."""
    llm = LLM(folder, **ROOM)
    params, free = SamplingParams(**STUCK, n=2, seed=1, logprobs=1), SamplingParams(max_tokens=6, ignore_eos=True)
    stuck, other = llm.generate(["e", "e"], [params, free])
    assert len(other.outputs[0].token_ids) == 6
    for answer in stuck.outputs:
        assert (len(answer.token_ids), answer.finish_reason, answer.stop_reason) == (1, "abort", SENTENCE)
        assert answer.text in ("c", "d")

    async def ask() -> list:
        async with AsyncEngine(llm) as engine:
            seen = [output async for output in engine.generate("e", params)]
            return [seen[-1], await engine.complete("e", params)]

    for output in asyncio.run(asyncio.wait_for(ask(), 300)):
        assert [(answer.finish_reason, answer.stop_reason) for answer in output.outputs] == [("abort", SENTENCE)] * 2


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": [2], "bad_words": ["c"]}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": [2, END], "bad_words": ["c"], "min_tokens": 1}, "allowed_token_ids, bad_words and min_tokens"),
        ({"allowed_token_ids": [2], "logit_bias": {2: -math.inf}}, "allowed_token_ids and logit_bias"),
        ({"logit_bias": dict.fromkeys(range(VOCABULARY), -math.inf)}, "logit_bias"),
        ({"structured": {"choice": ["c", "ca"]}, "logit_bias": {2: -math.inf}}, "logit_bias and structured"),
        ({"min_tokens": 1, "stop_token_ids": [*range(12)]}, "min_tokens"),
        # a word that began in the prompt
        ({"allowed_token_ids": [2], "bad_words": ["ec"]}, "allowed_token_ids and bad_words"),
        ({"beam_width": 2, "min_tokens": 1, "stop_token_ids": [*range(12)]}, "min_tokens"),
    ],
)
def test_what_can_be_known_is_refused(fields: dict, names: str, folder: Path) -> None:
    if "structured" in fields:
        pytest.importorskip("llguidance", reason="llguidance is not installed")
    llm = LLM(folder, **ROOM)
    (output,) = llm.generate("e", SamplingParams(**fields))
    assert output.error == f"every token is forbidden where the answer begins, by {names}: allow another"
    assert output.outputs == []


@pytest.mark.parametrize("fields", [{}, {"bad_words": ["a"], "logprobs": 2}, {"beam_width": 2}, {"top_p": 0.5, "n": 3}])
def test_logits_that_are_all_nan_end_a_request(fields: dict, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error: the model is broken. The first token of all came back before."""
    llm = LLM(folder, **ROOM)
    logits = llm.engine.runner.decoder.logits
    monkeypatch.setattr(llm.engine.runner.decoder, "logits", lambda *args, **how: logits(*args, **how).fill_(math.nan))
    (output,) = llm.generate("e", SamplingParams(**fields))
    assert "the logits of every token that " in str(output.error)
    assert_clean(llm)


def test_a_grammar_that_no_token_follows(folder: Path) -> None:
    """Its text may be anything; the tokenizer has no token for what is left of it."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    llm = LLM(folder, **ROOM)
    answered, refused, whole = llm.generate(
        ["e"] * 3, [SamplingParams(structured={"regex": regex}, max_tokens=9) for regex in ("cdz", "z", "c(z|d)")]
    )
    (answer,) = answered.outputs
    assert (answer.text, answer.finish_reason) == ("cd", "abort")
    assert answer.stop_reason == "every token is forbidden here, by structured"
    assert "it allows no token of this model where an answer begins" in str(refused.error)
    assert (whole.outputs[0].text, whole.outputs[0].finish_reason) == ("cd", "stop")


def test_a_model_without_an_end_of_text_follows_grammars_to_theirs(folder: Path) -> None:
    """Its first token stood for the end, and was in the answers."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    llm = LLM(folder, **ROOM)
    llm.engine.grammars._ends = []
    llm.engine._eos = frozenset()
    params = SamplingParams(structured={"regex": "c+d?"}, n=16, seed=0, max_tokens=5)
    for answer in llm.generate("e", params)[0].outputs:
        assert set(answer.text) <= {"c", "d"}
        assert answer.finish_reason == ("stop" if answer.text[-1] == "d" else "length")


def test_a_bias_of_minus_infinity_is_a_ban(folder: Path) -> None:
    llm = LLM(folder, **ROOM)
    free = llm.generate("e", SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids
    banned = SamplingParams(temperature=0, max_tokens=30, logit_bias={free[0]: -math.inf}, ignore_eos=True)
    found = llm.generate("e", banned)[0].outputs[0].token_ids
    assert free[0] not in found
    assert len(found) == 30
    for wrong in (math.inf, math.nan, -101.0):
        with pytest.raises(InvalidInput, match="from -100 to 100, or -inf"):
            SamplingParams(logit_bias={1: wrong})
