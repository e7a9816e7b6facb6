"""Under `deterministic` an answer is the same to the bit, tokens and logprobs, whatever runs beside it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps.batch_invariant import TILE, tiles_of
from rooftile.engine.steps.step_inputs import StepInputs
from rooftile.errors import InvalidInput
from rooftile.fused import linear
from tests.engine.asking import ROOM, assert_clean, prompts

BESIDE = {
    "together": {},
    "in chunks": {"max_batched_tokens": 13},
    "preempted, in chunks": {"num_blocks": 9, "max_batched_tokens": 10},
    "in blocks of 8, three at once": {"block_size": 8, "max_num_seqs": 3, "max_model_len": 90, "num_blocks": 40},
}
# the beams of a search with states share no block after a preemption, so few blocks are not enough for them
STATES = [how for how in BESIDE if "preempted" not in how]
# in fp32 a sum in another order shows; in bf16 logits tie
CASES = [("llama", torch.float32, how) for how in BESIDE] + [
    ("gemma2", torch.float32, "preempted, in chunks"), ("qwen3", torch.bfloat16, "preempted, in chunks"),
    pytest.param("gpt2", torch.float32, "together", marks=pytest.mark.sweep),
    *(("mamba2", torch.float32, how) for how in STATES),
    *(
        pytest.param(name, torch.float32, how, marks=() if how == STATES[n % 3] else pytest.mark.sweep)
        for n, name in enumerate(("mamba", "bamba", "qwen3_next")) for how in STATES
    ),
    ("mixtral", torch.float32, "preempted, in chunks"), ("falcon_mamba", torch.float32, "in chunks"),
    ("jamba", torch.float32, "in chunks"), ("granitemoehybrid", torch.float32, "in chunks"),
    ("olmo_hybrid", torch.bfloat16, "together"), ("bamba", torch.bfloat16, "in blocks of 8, three at once"),
]  # fmt: skip


def bits(outputs: list[RequestOutput]) -> list[object]:
    """All that a caller sees of the answers."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [[(a.token_ids, a.logprobs, a.cumulative_logprob, a.score) for a in output.outputs] for output in outputs]


def params_of(count: int) -> list[SamplingParams]:
    """Greedy, sampled and searched answers, with and without what changes a step's features."""
    return [
        SamplingParams(beam_width=3, max_tokens=4, ignore_eos=True) if n % 6 == 5 else SamplingParams(
            temperature=0.8 * (n % 2), top_k=9 * (n % 3), presence_penalty=0.5 * (n % 4 == 1), seed=n,
            n=1 + (n % 5 == 1), max_tokens=3 + n % 5, ignore_eos=True, logprobs=n % 4,
        )
        for n in range(count)
    ]  # fmt: skip


ASKED, PARAMS = prompts(17, seed=3), params_of(17)


@cache
def alone(folder: Path, dtype: torch.dtype) -> list[object]:
    """The answers to ASKED, one by one."""
    llm = LLM(folder, **ROOM, dtype=dtype, deterministic=True, enable_prefix_caching=False)
    return [bits(llm.generate([prompt], params))[0] for prompt, params in zip(ASKED, PARAMS, strict=True)]


@pytest.mark.parametrize(("name", "dtype", "how"), CASES, ids=str)
def test_answers_are_the_same_whatever_runs_beside_them(name: str, dtype: torch.dtype, how: str, peers) -> None:
    folder = peers(name).folder
    llm = LLM(folder, **ROOM | BESIDE[how], dtype=dtype, deterministic=True)
    assert bits(llm.generate(ASKED, PARAMS)) == alone(folder, dtype)
    assert (llm.engine.scheduler.preemptions > 0) == (how == "preempted, in chunks")
    # some once more, with prefixes that the cache has kept, in another order
    again = llm.generate(ASKED[9::-1], PARAMS[9::-1])
    assert bits(again)[::-1] == alone(folder, dtype)[:10]
    assert (how != "together") or any(output.num_cached_tokens for output in again)
    assert_clean(llm)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("mamba", "mamba2", "qwen3_next")), ("bamba", torch.bfloat16),
        # these mix the layers of those above with others
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                ("bamba", torch.float32), ("jamba", torch.float32), ("granitemoehybrid", torch.float32),
                ("olmo_hybrid", torch.bfloat16), ("mamba2", torch.bfloat16),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_answers_with_states_are_the_same_after_a_preemption(name: str, dtype: torch.dtype, peers) -> None:
    """Prompts that begin alike, whose states are kept on the way, and answers that are read again with their prompts."""
    asked = [[*ASKED[5][: 9 + n], *range(n)] for n in range(12)]
    params = [SamplingParams(temperature=n % 2, max_tokens=24, ignore_eos=True, logprobs=2, seed=n) for n in range(12)]
    settings = ROOM | {"dtype": dtype, "deterministic": True, "block_size": 8}
    alone = LLM(peers(name).folder, **settings, enable_prefix_caching=False)
    due = [bits(alone.generate([prompt], its))[0] for prompt, its in zip(asked, params, strict=True)]
    llm = LLM(peers(name).folder, **settings | {"num_blocks": 14, "max_batched_tokens": 11, "state_every": 8})
    assert bits(llm.generate(asked, params)) == due
    assert llm.engine.scheduler.preemptions > 3
    assert bits(llm.generate(asked[::-1], params[::-1])) == due[::-1]
    assert_clean(llm)


def test_logprobs_of_a_prompt_are_those_of_the_same_tokens_as_an_answer(peers) -> None:
    """Read in one chunk, they have the bits that they had token by token; a step ahead changes nothing."""
    llm = LLM(peers("llama").folder, **ROOM, deterministic=True)
    llm.engine._ahead = True
    (prompt, *others) = prompts(4, seed=4)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    (answer,) = llm.generate([prompt, *others], params)[0].outputs
    told = llm.generate([[*prompt, *answer.token_ids]], SamplingParams(max_tokens=1, prompt_logprobs=2))[0].prompt_logprobs
    assert told is not None
    assert told[len(prompt) :] == answer.logprobs


def test_a_cache_in_fp8(peers) -> None:
    folder, asked = peers("qwen3").folder, prompts(4, seed=5)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    alone, llm = (LLM(folder, **ROOM | more, deterministic=True, kv_dtype="fp8") for more in ({}, {"max_batched_tokens": 7}))
    assert bits(llm.generate(asked, params)) == [bits(alone.generate([prompt], params))[0] for prompt in asked]


def test_tiles_begin_at_multiples_of_their_size() -> None:
    positions = torch.tensor([*range(13, 35), 40, 41, 7, 16])
    slots = torch.tensor([2] * 22 + [0, 0, 1, 1])
    empty = torch.empty(0, dtype=torch.int64)
    inputs = StepInputs(100 + torch.arange(26), positions, slots, *[empty] * 6)
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    tiles = list(tiles_of(inputs, table, 8))
    assert [(tile.rows.start, tile.rows.stop) for tile in tiles] == [(0, 3), (3, 19), (19, 22), (22, 24), (24, 25), (25, 26)]
    assert torch.cat([tile.tokens[tile.places] for tile in tiles]).equal(inputs.tokens)
    assert torch.cat([tile.positions[tile.places] for tile in tiles]).equal(positions)
    for tile in tiles:
        assert len(tile.tokens) == len(tile.positions) == len(tile.slots) == tile.chunks.tokens == TILE
        assert torch.equal(tile.places, tile.positions[tile.places] % TILE)
        assert (tile.positions >= 0).sum() == len(tile.places)
        (stop,) = tile.chunks.lengths.tolist()
        assert stop == (tile.positions.max().item() // TILE + 1) * TILE
        assert tile.chunks.table.tolist() == [table[tile.slots[0], : stop // 8].tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(97, 40, True), (48, 129, False), (1, 1, True)])
def test_a_row_of_a_product_does_not_depend_on_the_others(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(70, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    added = torch.randn(outputs, dtype=dtype) if bias else None
    found = linear(x, weight, added)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    eps = torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= eps * (exact.abs() + inputs)).all()
    for rows in (slice(0, 1), slice(3, 4), slice(5, 22), slice(20, 70), slice(7, 7)):
        assert torch.equal(linear(x[rows], weight, added), found[rows])
    order = torch.randperm(70)
    assert torch.equal(linear(x[order], weight, added), found[order])


def test_gradients_of_a_product() -> None:
    x, weight, bias = torch.randn(5, 3).requires_grad_(), torch.randn(4, 3).requires_grad_(), torch.randn(4).requires_grad_()
    do = torch.randn(5, 4)
    found = torch.autograd.grad(linear(x, weight, bias), (x, weight, bias), do)
    torch.testing.assert_close(found, (do @ weight, do.T @ x, do.sum(0)))


def test_the_option_is_on_or_off(peers) -> None:
    with pytest.raises(InvalidInput, match="deterministic is 1; must be True or False"):
        LLM(peers("llama").folder, **ROOM, deterministic=1)
