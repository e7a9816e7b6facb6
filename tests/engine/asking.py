"""Prompts, the tokens that an engine answers with, and whether it is left clean."""

from __future__ import annotations

import random

import pytest

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from tests.models.checkpoints import VOCABULARY

# all that differs in how a family is served: windows in every layer, in some or in none, softcap, norms of heads, positions
FAMILIES = ["llama", "mistral", "qwen3", "gemma2", "gpt2"]
# families that differ from these in their layers, and not in how they are served: `make test` serves each once
MORE_FAMILIES = [
    "llama, llama3", "qwen2", "qwen2, windows", "qwen2, of 2.5", "qwen2, yarn", "gemma3_text", "granite",
    "ministral", "ministral3", "olmo2", "olmo3", "phi3",
    "phi3, longrope", "smollm3", "mamba", "mamba2", "bamba", "qwen3_next", "qwen3_5_text", "olmo_hybrid",
    "mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoehybrid", "falcon_mamba", "jamba", "deepseek_v3", "deepseek_v2",
    "nemotron_h",
]  # fmt: skip
TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
ROOM = {"max_model_len": 96, "num_blocks": 600}

# an engine with room for all, and one that preempts; each with a step ahead and without in `make test-sweep`
preempted_or_not = pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        (ROOM, False),
        ({"max_model_len": 96, "num_blocks": 14}, True),
        pytest.param(ROOM, True, marks=pytest.mark.sweep),
        pytest.param({"max_model_len": 96, "num_blocks": 14}, False, marks=pytest.mark.sweep),
    ],
    ids=["", "preempted, a step ahead", "a step ahead", "preempted"],
)


def prompts(count: int = 64, seed: int = 0) -> list[list[int]]:
    """Returns prompts with lengths around multiples of a block, some with a common prefix."""
    rng = random.Random(seed)
    made = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 7, 15, 16, 17, 33, 48, 60]))] for _ in range(count)]
    for n in range(3, count, 5):
        made[n] = made[n - 1][:40] + made[n]
        del made[n][60:]
    return made


def tokens_of(llm: LLM, asked: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[list[int]]]:
    """All answers to each prompt; the engine is left clean."""
    outputs = llm.generate(asked, params)
    assert [output.error for output in outputs] == [None] * len(asked)
    assert [output.prompt_token_ids for output in outputs] == asked
    assert_clean(llm)
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def assert_clean(llm: LLM) -> None:
    engine = llm.engine
    engine.pool.check()
    assert engine.pool.used_blocks == 0
    assert engine.idle
    assert sorted(engine.scheduler._slots) == list(range(engine.max_answers))
