"""Sampling parameters: the check of each value, and of contradictions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rooftile.engine import EngineConfig
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput


def test_defaults_and_what_other_engines_write() -> None:
    assert not SamplingParams().greedy
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0, beam_width=2).greedy
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0) == SamplingParams()
    assert SamplingParams(stop="a").stops == SamplingParams(stop=["a"]).stops == ("a",)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(max_tokens=None, logprobs=0, seed=0, logit_bias={3: -100}).max_tokens is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"n": 0}, "n is 0; must be a whole number from 1 to 16"),
        ({"n": 17}, "n is 17; must be a whole number from 1 to 16"),
        ({"n": True}, "n is True; must be"),
        ({"n": 2.0}, "n is 2.0; must be a whole number"),
        ({"n": None}, "n is None; must be"),
        ({"temperature": -1}, "temperature is -1; must be a finite number of at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 10**400}, "temperature is 10{400}; must be a finite number of at least 0"),
        ({"logit_bias": {1: 10**400}}, r"logit_bias of token 1 is 10{50,}\.\.\.; must be a number"),
        ({"top_p": 0}, "top_p is 0; must be a finite number above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2; must be a whole number of at least 0"),
        ({"min_p": 1.5}, "min_p is 1.5; must be a finite number from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty is 3; must be a finite number from -2 to 2"),
        ({"frequency_penalty": "1"}, "frequency_penalty is '1'"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; must be a finite number above 0$"),
        ({"logit_bias": {"a": 1}}, "logit_bias has 'a' for a token"),
        ({"logit_bias": {1: 101}}, "logit_bias of token 1 is 101"),
        ({"seed": -1}, "seed is -1"),
        ({"max_tokens": 0}, "max_tokens is 0; must be a whole number of at least 1"),
        ({"min_tokens": 20}, "min_tokens is 20 and max_tokens 16"),
        ({"stop": [""]}, "a stop is ''; must be a string of 1 to 256"),
        ({"stop": ["a" * 300]}, "a stop is 300 characters long"),
        ({"stop": ["a"] * 17}, "there are 17 stops; there may be at most 16"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids has 1.5"),
        ({"logprobs": 21}, "logprobs is 21; must be a whole number from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"beam_width": 99}, "beam_width is 99"),
        ({"beam_width": 2, "n": 3}, "n is 3 with beam_width 2"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p is 0.5 with beam_width 2; a search draws nothing"),
        ({"beam_width": 2, "seed": 1}, "seed is 1 with beam_width 2"),
        ({"beam_width": 2, "temperature": 0.5}, "temperature is 0.5 with beam_width 2"),
        ({"length_penalty": math.nan}, "length_penalty is nan; must be a finite number from -10 to 10"),
        ({"beam_width": 2, "length_penalty": 1e4}, "length_penalty is 10000.0; must be a finite number from -10 to 10"),
        ({"beam_width": 2, "logprobs": 1}, "logprobs is 1 with beam_width 2; a search has the sum of an answer's alone"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs is 0 with beam_width 2"),
        ({"beam_width": 2, "seed": 0}, "seed is 0 with beam_width 2"),
        ({"beam_width": 2, "repetition_penalty": 1.5}, "repetition_penalty is 1.5 with beam_width 2; a search takes scores as"),
        ({"beam_width": 2, "frequency_penalty": 1}, "frequency_penalty is 1 with beam_width 2"),
        ({"beam_width": 2, "presence_penalty": 1}, "presence_penalty is 1 with beam_width 2"),
        ({"beam_width": 2, "logit_bias": {1: 1}}, "logit_bias is {1: 1} with beam_width 2"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0 without beam_width; it is of a search alone"),
        ({"early_stopping": True}, "early_stopping is True without beam_width; it is of a search alone"),
        ({"early_stopping": "never", "beam_width": 2}, "early_stopping is 'never'; must be True or False"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; must be True or False"),
        ({"include_stop": 1}, "include_stop is 1; must be True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens is None; must be True or False"),
        ({"stop": 5}, "stop is 5; must be a string, or a list of them"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; must be a list of token ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids is '12'; must be a list of token ids"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; must be a dictionary of token ids and biases"),
        ({"seed": 2**63}, f"seed is {2**63}; must be a whole number from 0 to {2**63 - 1}"),
    ],
    ids=lambda what: str(what)[:40],
)
def test_bad_values(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        SamplingParams(**given)


def test_what_was_checked_does_not_change_afterwards() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[10**9] = 1.0
    assert params.logit_bias == {1: 1.0}


def test_tokens_that_a_model_has_not() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[0]).check_vocabulary(10)
    for given in ({"logit_bias": {10: 1.0}}, {"stop_token_ids": [-1]}):
        with pytest.raises(InvalidInput, match="the model has 0 to 9"):
            SamplingParams(**given).check_vocabulary(10)


def test_settings_print_as_the_words_that_make_them() -> None:
    made = SamplingParams(temperature=0, max_tokens=20, stop=".")
    assert repr(made) == "SamplingParams(temperature=0, max_tokens=20, stop=('.',))"
    assert eval(repr(made)) == made
    assert repr(SamplingParams()) == "SamplingParams()"
    config = EngineConfig(max_model_len=64, enforce_eager=True)
    assert repr(config) == "EngineConfig(max_model_len=64, enforce_eager=True)"
    assert eval(repr(config)) == config


def test_numbers_of_numpy_are_pythons() -> None:
    given = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_k=np.uint8(7), seed=np.int32(3), stop_token_ids=[np.int64(4)],
        logit_bias={np.int64(5): np.float64(-1)}, priority=np.int16(-2),
    )  # fmt: skip
    assert given == SamplingParams(n=2, temperature=0.5, top_k=7, seed=3, stop_token_ids=[4], logit_bias={5: -1.0}, priority=-2)
    assert all(type(getattr(given, name)) is int for name in ("n", "top_k", "seed", "priority"))
    assert [type(token) for token in (*given.stop_token_ids, *given.logit_bias)] == [int, int]
    for wrong in (np.bool_(True), np.float32(2.0), np.array([2])):
        with pytest.raises(InvalidInput, match=r"n is .*; must be a whole number"):
            SamplingParams(n=wrong)
    config = EngineConfig(block_size=np.int64(16), state_share=np.float32(0.25), speculative={"tokens": np.int64(3)})
    assert (type(config.block_size), config.state_share) == (int, 0.25)
