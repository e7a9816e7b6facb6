"""A draft model: answers are those without it, its keys are those of the tokens that stay, and its guesses are as good as due."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rooftile.cost.decoder import DecoderCost
from rooftile.engine.llm import LLM
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.speculation.forecast import Forecast
from rooftile.engine.speculation.pace import SteadyPace
from rooftile.engine.speculation.settings import Speculation
from rooftile.errors import InvalidInput, Unsupported
from rooftile.hardware.chips import Rates
from rooftile.models import Decoder, ModelConfig
from tests.engine.asking import ROOM, assert_clean, prompts
from tests.engine.folders import save
from tests.engine.test_speculation import asked_params, told
from tests.models.checkpoints import SMALL, VOCABULARY, saved

ALWAYS = {"tokens": 5, "max_batch": 1000}
SETTINGS: dict[str, Any] = {
    "together": ROOM,
    "in chunks": ROOM | {"max_batched_tokens": 37, "max_num_seqs": 6},
    "preempted": {"max_model_len": 96, "num_blocks": 14},
    "three at once, small blocks": ROOM | {"max_num_seqs": 3, "block_size": 8, "max_batched_tokens": 40},
    "contiguous": ROOM | {"allocator": "contiguous", "num_blocks": 40},
}
AHEAD = ("preempted",)
# each kind of request twice
COUNT = 26


def loosened(decoder: Decoder, noise: float) -> Decoder:
    """A copy of a decoder with other weights, which are nearly the same."""
    found = Decoder.random(decoder.config, decoder.embedding.dtype, "cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for ours, theirs in zip(found.parameters(), decoder.parameters(), strict=True):
            ours.copy_(theirs)
            ours.add_(noise * theirs.std(correction=0) * torch.randn(theirs.shape, generator=generator))
    return found


def drafted(target: Any, draft: Any, **settings: Any) -> LLM:
    return LLM(target, speculative=ALWAYS | {"model": draft}, **settings)


@pytest.fixture(scope="module")
def plain(peers) -> list[RequestOutput]:
    return LLM(peers("llama").folder, **ROOM).generate(prompts(COUNT), asked_params(COUNT))


@pytest.fixture(scope="module")
def draft(peers) -> Decoder:
    return loosened(Decoder.from_folder(peers("llama").folder), 0.05)


SWEPT = ("contiguous", "in chunks")


@pytest.mark.parametrize(
    ("how", "ahead"),
    [
        *(pytest.param(how, False, marks=[pytest.mark.sweep] * (how in SWEPT)) for how in SETTINGS),
        *((how, True) for how in AHEAD),
    ],
)
def test_tokens_are_those_without_drafts(how: str, ahead: bool, peers, plain, draft) -> None:
    """Whatever is asked for: sampled, with penalties, logprobs, stops, several answers, a beam search, in chunks, preempted."""
    llm = drafted(peers("llama").folder, draft, **SETTINGS[how])
    llm.engine._ahead = ahead
    found = llm.generate(prompts(COUNT), asked_params(COUNT))
    assert told(found) == told(plain)
    for one, other in zip(found, plain, strict=True):
        for answer, due in zip(one.outputs, other.outputs, strict=True):
            if due.logprobs is not None:
                assert [list(each) for each in answer.logprobs] == [list(each) for each in due.logprobs]
                assert answer.cumulative_logprob == pytest.approx(due.cumulative_logprob, abs=1e-3)
    assert_clean(llm)
    counts = llm.engine.speculator.counts
    assert 0.2 * counts["drafted"] < counts["accepted"] < 0.95 * counts["drafted"]
    assert counts["accepted"] > 80


EASY = ({"temperature": 0}, {"seed": 1, "top_k": 20}, {"seed": 2, "n": 3, "temperature": 0.7, "top_p": 0.95}, {"seed": 3})


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.sweep] * (how == "contiguous")) for how in [*SETTINGS, "ahead"]]
)
def test_a_model_accepts_all_of_its_own_guesses(how: str, peers) -> None:
    """Only if its keys as a draft are those of the accepted tokens: after drafts, forks, prefixes that are found, preemption."""
    settings = SETTINGS.get(how, ROOM)
    llm = drafted(peers("llama").folder, peers("llama").folder, **settings)
    llm.engine._ahead = how == "ahead"
    params = [SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | EASY[n % 4]) for n in range(20)]
    for _ in range(2):
        llm.generate(prompts(20), params)
        assert_clean(llm)
    counts = llm.engine.speculator.counts
    assert counts["accepted"] >= counts["drafted"] - 3 > 600


def test_only_what_is_lacking_is_read(peers, monkeypatch) -> None:
    """After a draft one token or two; of a prompt what the prefix cache has not; nothing where there is no draft."""
    llm = drafted(peers("llama").folder, peers("llama").folder, **ROOM)
    runner, read = llm.engine.runner.draft, list[int]()
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda step: (read.append(len(step.inputs.tokens)), execute(step))[1])
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    prompt = [(7 * n) % VOCABULARY for n in range(50)]
    llm.generate([prompt], params)
    # the prompt and its first token, then two behind a draft that was accepted whole
    assert read[0] == 51
    assert set(read[1:]) <= {1, 2}
    read.clear()
    llm.generate([prompt], params)
    assert read[0] == 51 - 48
    read.clear()
    llm.generate([[*prompt[:40], 1, 2, 3]], params)
    assert read[0] == 44 - 32
    read.clear()
    quiet = LLM(peers("llama").folder, speculative=ALWAYS | {"model": peers("llama").folder, "max_batch": 1}, **ROOM)
    monkeypatch.setattr(quiet.engine.runner.draft, "execute", lambda step: pytest.fail("a draft for a batch that is too large"))
    quiet.generate([prompt, prompt[1:]], params)


def alike_everywhere(folder: Path, seed: int, scale: float) -> tuple[Decoder, torch.Tensor]:
    """A decoder whose next token has the same distribution whatever it has read, and that distribution."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 8, "num_hidden_layers": 1, "num_key_value_heads": 4})
    config.save_pretrained(folder)
    decoder = Decoder.random(ModelConfig.from_folder(folder), torch.float32, seed=seed)
    with torch.no_grad():
        decoder.embedding.copy_(decoder.embedding[:1].expand_as(decoder.embedding))
        decoder.head.mul_(scale)
    (first,) = LLM(decoder, **ROOM).generate([[3]], SamplingParams(max_tokens=1, ignore_eos=True, logprobs=8))
    told = first.outputs[0].logprobs[0]
    return decoder, torch.tensor([told[token].logprob for token in range(8)]).exp().double()


def test_draws_have_the_distribution_of_the_model_and_guesses_the_due_share(tmp_path: Path, monkeypatch) -> None:
    """18,500 tokens, each drawn without a seed of its own: 1 % more of one is seen, and so is a guess from other noise."""
    (target, p), (draft, q) = (alike_everywhere(tmp_path, *made) for made in ((0, 1), (5, 3)))
    assert float((p - q).abs().sum() / 2) > 0.1
    assert p.max() < 0.9
    assert p.min() > 0.01
    llm = LLM(target, speculative={"tokens": 3, "max_batch": 2000, "model": draft}, max_model_len=128, num_blocks=4000,
              max_num_seqs=1200, seed=1)  # fmt: skip
    seen, note = list[tuple[int, int]](), llm.engine.speculator.note
    monkeypatch.setattr(llm.engine.speculator, "note", lambda answer, *found: (seen.append(found), note(answer, *found))[1])
    outputs = llm.generate([[n % 8, 3, n % 5] for n in range(185)], SamplingParams(max_tokens=100, ignore_eos=True))
    tokens = [output.outputs[0].token_ids for output in outputs]
    total = Counter(token for row in tokens for token in row)
    N = sum(total.values())
    for token in range(8):
        assert abs(total[token] / N - p[token]) < 4 * (p[token] * (1 - p[token]) / N) ** 0.5 < 0.011
    pairs = Counter(pair for row in tokens for pair in pairwise(row))
    due = {(a, b): float(p[a] * p[b]) * sum(pairs.values()) for a in range(8) for b in range(8)}
    assert sum((pairs[pair] - count) ** 2 / count for pair, count in due.items()) < 63 + 4 * (2 * 63) ** 0.5
    # where both draw with the same noise, both draw i with probability 1 / sum over j of max(p_j / p_i, q_j / q_i)
    share = float((1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum())
    assert share > float(torch.minimum(p, q).sum()) - 0.1
    # a draft's last token that counts is the first that was refused
    kept, tried = (sum(numbers) for numbers in zip(*((n, min(n + 1, count)) for count, n in seen), strict=True))
    assert abs(kept / tried - share) < 4 * (share * (1 - share) / tried) ** 0.5 < 0.025


@pytest.fixture(scope="module")
def with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 427, "initializer_range": 0.2})
    saved(transformers.AutoModelForCausalLM.from_config(config), path)
    return save("byte_level", path, chat_template="<|user|>{{ messages[0]['content'] }}<|user|><think>")


@pytest.mark.parametrize("ahead", [False, True])
def test_grammars_stop_strings_bad_words_and_thoughts(ahead: bool, with_text: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
    usual: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    asked = [
        SamplingParams(max_tokens=30, seed=2, structured={"json": schema}),
        SamplingParams(max_tokens=30, seed=3, n=2, structured={"regex": "[a-f]{9}(stop|the)"}, top_p=0.9),
        SamplingParams(**usual, seed=4, bad_words=["the", "stop", "an", "ing of"]),
        SamplingParams(max_tokens=9, seed=5, structured={"choice": ["a", "stop", "naïve"]}, presence_penalty=0.5),
        *(SamplingParams(**usual, seed=n, stop=["e", "s t"], min_tokens=4) for n in range(6, 9)),
        SamplingParams(**usual, temperature=0, stop=["a"], include_stop=True),
        SamplingParams(max_tokens=30, seed=9, thinking_token_budget=5, structured={"choice": ["a", "stop"]}),
        SamplingParams(**usual, temperature=0, thinking_token_budget=7, priority=-1),
    ]
    texts = ["cat", "the stop", "naïve and a cat of tiles", "stop", "a", "b", "roof", "stream of"]
    texts += ["<|user|>cat<|user|><think>", "<|user|>the stop<|user|><think>"]
    due = LLM(with_text, **ROOM).generate(texts, asked)
    llm = drafted(with_text, with_text, **ROOM | {"num_blocks": 7})
    llm.engine._ahead = ahead
    assert told(llm.generate(texts, asked)) == told(due)
    counts = llm.engine.speculator.counts
    # a guess that a grammar has not, or behind an end, is left out
    assert 60 < counts["accepted"] <= counts["drafted"]
    assert llm.engine.scheduler.preemptions > 0
    assert_clean(llm)


@pytest.mark.parametrize("vocabulary", [VOCABULARY + 7, VOCABULARY - 30])
def test_vocabularies_of_other_sizes(vocabulary: int, peers, plain, tmp_path: Path) -> None:
    """Rows that pad an embedding are never guessed; behind a token that the draft has no row for there is no draft."""
    torch.manual_seed(4)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": vocabulary, "num_hidden_layers": 1, "max_position_embeddings": 40})
    folder = saved(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    llm = drafted(peers("llama").folder, folder, **ROOM)
    assert told(llm.generate(prompts(20), asked_params(20))) == told(plain[:20])
    assert llm.engine.speculator.counts["drafted"] > 10
    # a prompt beyond the draft's positions has no draft
    drafts = llm.engine.speculator.counts["drafts"]
    llm.generate([[1] * 50], SamplingParams(max_tokens=9, ignore_eos=True))
    assert llm.engine.speculator.counts["drafts"] == drafts


def test_other_families_draft_for_one_another(peers) -> None:
    params = [SamplingParams(max_tokens=12, seed=n, ignore_eos=True, temperature=n % 2) for n in range(10)]
    for target, draft in (("deepseek_v3", "gemma2"), ("gemma2", "deepseek_v3"), ("mamba2", "llama")):
        if target == "mamba2":
            with pytest.raises(Unsupported, match="layers of the kind 'mamba2', which cannot take back"):
                drafted(peers(target).folder, peers(draft).folder, **ROOM)
            continue
        due = LLM(peers(target).folder, **ROOM).generate(prompts(10), params)
        for folder in (peers(draft).folder, peers(target).folder):
            llm = drafted(peers(target).folder, folder, **ROOM)
            assert told(llm.generate(prompts(10), params)) == told(due)
        counts = llm.engine.speculator.counts
        assert counts["accepted"] > 0.97 * counts["drafted"] > 30


def test_the_same_bits_under_deterministic(peers, draft) -> None:
    params = [SamplingParams(max_tokens=12, seed=n, logprobs=2, ignore_eos=True, frequency_penalty=n % 2) for n in range(4)]
    due = LLM(peers("llama").folder, deterministic=True, **ROOM).generate(prompts(4), params)
    llm = drafted(peers("llama").folder, draft, deterministic=True, **ROOM)
    found = llm.generate(prompts(4), params)
    assert [output.outputs[0].logprobs for output in found] == [output.outputs[0].logprobs for output in due]
    assert llm.engine.speculator.counts["accepted"] > 10


def test_what_does_not_go_together_is_refused(peers, with_text: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="draft model has layers of the kind 'mamba2', which cannot take back"):
        drafted(peers("llama").folder, peers("mamba2").folder, **ROOM)
    with pytest.raises(InvalidInput, match=r"of the draft model: .*nowhere is not a folder"):
        drafted(peers("llama").folder, tmp_path / "nowhere", **ROOM)
    with pytest.raises(InvalidInput, match=r"the model 3\.5; must be a folder"):
        drafted(peers("llama").folder, 3.5, **ROOM)
    for kind, said in (("unigram", "has another tokenizer than the model"), ("byte_level", None)):
        folder = tmp_path / kind
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SMALL | {"vocab_size": 448})
        saved(transformers.AutoModelForCausalLM.from_config(config), folder)
        # another template and another end of text change no token
        save(kind, folder, eos_token="<|user|>")
        if said is None:
            assert drafted(with_text, folder, **ROOM).engine.runner.draft is not None
        else:
            with pytest.raises(InvalidInput, match=said):
                drafted(with_text, folder, **ROOM)


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ("draft", InvalidInput, "the method 'draft' and the model None"), ({"model": 3}, InvalidInput, "the model 3; must be"),
        ({"model": "a", "longest": 3}, InvalidInput, "longest = 3 and the method 'draft'"),
        ({"model": "a", "method": "lookup"}, InvalidInput, "a model, a, and the method"),
        ({"model": "a", "tokens": 32}, InvalidInput, "tokens = 32"), ({"model": "a", "quick": 1}, InvalidInput, "has 'quick'"),
    ],
)  # fmt: skip
def test_wrong_settings_get_a_sentence(given: object, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as error:
        Speculation.of(given)
    assert said in str(error.value)


def test_settings_are_vllms_too() -> None:
    due = Speculation(method="draft", model="small", tokens=5)
    for given in (
        {"model": "small", "num_speculative_tokens": 5}, {"model": "small", "method": "draft_model", "tokens": 5},
        '{"method": "draft", "model": "small", "num_speculative_tokens": 5}',
    ):  # fmt: skip
        assert Speculation.of(given) == due
    assert Speculation.of({"model": "small"}).tokens == 8


def test_a_pace_follows_the_share_that_is_accepted() -> None:
    pace, lengths = SteadyPace(10), list[int]()
    for accepted in (1, 1, 0, 0):
        for _ in range(60):
            pace.note(pace.length, accepted * pace.length, 50)
        lengths.append(pace.length)
    assert lengths == [10, 10, 1, 1]
    assert pace.pauses(50)
    # one refusal in a while is no reason for a pause, nor for a short draft
    pace = SteadyPace(10)
    for n in range(60):
        pace.note(pace.length, pace.length if n % 3 else 1, n)
        assert not pace.pauses(n)
    assert 4 <= pace.length <= 10


def test_drafts_are_made_where_they_pay() -> None:
    """8B and 1B in 16 bits on an H100: some tokens for one answer, none for 256, and none where the draft is as large."""
    cost = DecoderCost(weight_bytes=15_000_000_000, token_bytes=131_072, token_flops=14_000_000_000)
    small = DecoderCost(weight_bytes=2_500_000_000, token_bytes=32_768, token_flops=2_000_000_000)
    forecast = Forecast(cost, Rates(989e12, 3352e9), small)
    for _ in range(40):
        forecast.note(5, 4)
    most = [forecast.most(answers, answers * 1000, 15) for answers in (1, 8, 64, 256)]
    assert most == sorted(most, reverse=True)
    assert 3 <= most[0] <= 8
    assert most[-1] == 0
    # what it says is what it counts: the draft's steps, and one of the larger model, for what is got in it
    a, d = forecast.accepted, 4
    steps = 4 * (2.5e9 + 1000 * 32_768) / 3352e9 + (15e9 + 5 * 1000 * 131_072) / 3352e9
    due = sum(a**n for n in range(5)) * (15e9 + 1000 * 131_072) / 3352e9 / steps
    assert forecast.gain(1, 1000, d) == pytest.approx(due)
    assert Forecast(cost, Rates(989e12, 3352e9), cost).most(1, 1000, 15) == 0


def test_the_cache_tells_of_the_drafts_keys(peers) -> None:
    llm = drafted(peers("llama").folder, peers("gemma2").folder, **ROOM)
    assert "and a draft model's in 600 blocks of 16 tokens" in str(llm.caches)
    own = llm.engine.runner.draft.pages
    assert llm.caches.nbytes == llm.pages.nbytes + own.nbytes
    assert own.nbytes > 0


def test_both_models_share_the_memory_for_blocks(peers) -> None:
    """Without num_blocks the blocks are fewer, by what the draft keeps in each."""
    alone, both = (
        LLM(peers("llama").folder, max_num_seqs=1 << 15),
        drafted(peers("llama").folder, peers("llama").folder, max_num_seqs=1 << 15),
    )
    assert both.caches.nbytes == pytest.approx(alone.caches.nbytes, rel=0.01)
    assert both.engine.pool.total == pytest.approx(alone.engine.pool.total / 2, rel=0.01)
