"""Models with recurrences in the engine: tokens are Transformers', however prompts are cut, found again, forked and preempted.

Mixed with others, cut into chunks and preempted they are in test_engine.py, too, as all families.
"""

from __future__ import annotations

import asyncio
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import Mamba2Config

from rooftile.approximate import Loki, LokiLayers
from rooftile.engine import LLM, AsyncEngine, SamplingParams
from rooftile.engine.sampling.sampler import SamplingFeatures
from rooftile.errors import Unsupported
from tests.engine.asking import GREEDY, ROOM, TOKENS, assert_clean, prompts, tokens_of
from tests.engine.folders import save
from tests.engine.kinds_of_layers import SETTINGS, SIZE, check_beams, check_forks, check_greedy, check_logprobs
from tests.grids import swept
from tests.models.checkpoints import made, saved
from tests.models.recurrent import MAMBA2

NAMES = [
    "mamba", "falcon_mamba", "mamba2", "mamba2, groups", "bamba", "jamba", "granitemoehybrid", "granitemoehybrid, rope, groups",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "nemotron_h", "nemotron_h, experts",
]  # fmt: skip
SOME = ["mamba", "mamba2", "bamba", "granitemoehybrid", "qwen3_next, dense", "olmo_hybrid", "nemotron_h, experts"]


# a recurrence of one state of a head, and one beside layers of attention
BASIS = ("mamba2", "qwen3_next")


def _traits(case: tuple[str, str]) -> list:
    """`make test` runs the basis in every way, and every model with a preemption and without."""
    name, how = case
    return [(name, "preempted" in how), *[case] * (name in BASIS)]


@pytest.mark.parametrize(("name", "how"), swept(product(NAMES, SETTINGS), _traits))
def test_greedy_tokens_are_those_of_transformers(name: str, how: str, peers) -> None:
    check_greedy(peers(name), how)


@pytest.mark.parametrize("how", ["in chunks", "chunks of one"])
def test_bounds_of_time_steps_hold_in_prompts_and_answers(how: str, tmp_path: Path) -> None:
    """A step of Transformers 5.17 has no bounds, so one pass over all tokens says what is due."""
    model = made(Mamba2Config(**MAMBA2, time_step_limit=(0.6, 0.7)))
    llm, asked = LLM(saved(model, tmp_path), block_size=SIZE, **SETTINGS[how]), prompts(4)
    for prompt, (answer,) in zip(asked, tokens_of(llm, asked, GREEDY), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers(name: str, peers) -> None:
    check_logprobs(peers(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_is_found_with_its_state(name: str, peers) -> None:
    """A hit needs blocks and a state: one is kept where a prompt's last whole block ends."""
    peer, prefix = peers(name), prompts(1, seed=3)[0] * 4
    asked = [prefix[:45], [*prefix[:40], 5, 6, 7], [*prefix[:33], 5, 6], prefix[:41], prefix[:40], prefix[:45]]
    llm, found = LLM(peer.folder, block_size=SIZE, **ROOM), []
    for prompt in asked:
        (output,) = llm.generate([prompt], GREEDY)
        assert [output.outputs[0].token_ids] == peer.greedy([prompt], TOKENS)
        found.append(output.num_cached_tokens)
        assert_clean(llm)
    # after 32 tokens no state was kept until a prompt ended there
    assert found == [0, 40, 0, 40, 32, 40]


@pytest.mark.parametrize("name", NAMES)
def test_forks_are_answers_of_their_own(name: str, peers) -> None:
    check_forks(peers(name))


# all with a preemption, and the basis without one
@pytest.mark.parametrize(
    ("name", "preempted"),
    swept(product(NAMES, (True, False)), lambda case: [case] * (case[1] or case[0] in BASIS)),
)
def test_beams_are_those_of_transformers(name: str, preempted: bool, peers) -> None:
    check_beams(peers(name), {"max_model_len": 96, "num_blocks": 28, "max_batched_tokens": 20} if preempted else ROOM)


@pytest.fixture
def with_text(peers, tmp_path: Path) -> Path:
    """A Mamba-2 with a tokenizer of more tokens than it has."""
    folder = shutil.copytree(peers("mamba2").folder, tmp_path / "model")
    save("byte_level", folder)
    return folder


def test_stop_strings_end_an_answer(with_text: Path, peers) -> None:
    prompt, llm = prompts(3)[2], LLM(with_text, block_size=SIZE, **ROOM)
    (whole,) = llm.generate([prompt], GREEDY)
    text = whole.outputs[0].text
    assert [whole.outputs[0].token_ids] == peers("mamba2").greedy([prompt], TOKENS)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop=stop)
    (stopped,) = llm.generate([prompt], params)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_callers_at_once(peers) -> None:
    asked, due = prompts(8), peers("mamba2").greedy(prompts(8), TOKENS)
    llm = LLM(peers("mamba2").folder, block_size=SIZE, **ROOM)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            found = await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in asked))
        assert [output.outputs[0].token_ids for output in found] == due

    asyncio.run(asyncio.wait_for(main(), 300))
    assert_clean(llm)


def test_the_state_is_in_fp32_and_the_tail_in_the_dtype_of_the_model(peers) -> None:
    llm = LLM(peers("bamba").folder, dtype="bf16", block_size=SIZE, **ROOM | {"max_num_seqs": 4, "state_share": 1e-9})
    states = llm.engine.runner.caches.states.memory
    # two layers; a row for each answer, for padding, for zeros, and one kept state
    assert {name: (tuple(x.shape), x.dtype) for name, x in states.items()} == {
        "mamba2 states": ((2, 7, 8, 10, 12), torch.float32), "mamba2 tails": ((2, 7, 104, 3), torch.bfloat16)
    }  # fmt: skip
    assert llm.engine.runner.pages.storage.dtype == torch.bfloat16
    assert len(tokens_of(llm, prompts(5), GREEDY)) == 5


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_rows_that_pad_a_step_change_the_state_of_no_answer(name: str, peers) -> None:
    """A graph's step of one answer and two rows of padding, which have no position."""
    found = []
    for rows in (1, 3):
        llm = LLM(peers(name).folder, block_size=SIZE, **ROOM | {"max_num_seqs": 4})
        runner = llm.engine.runner
        for memory in runner.caches.states.memory.values():
            memory.copy_(torch.arange(memory.numel()).view(memory.shape) % 7 / 10)
        before = {kind: memory.clone() for kind, memory in runner.caches.states.memory.items()}
        inputs = torch.tensor([[5, 0, 0], [9, -1, -1], [2, runner.pad_slot, runner.pad_slot]])[:, :rows]
        with torch.inference_mode():
            logits, _ = runner._decode(inputs, SamplingFeatures(), None)
        for kind, memory in runner.caches.states.memory.items():
            changed = (memory != before[kind]).flatten(2).any(-1)
            others = [row for row in range(memory.shape[1]) if row not in (2, runner.pad_slot)]
            assert changed[:, 2].all()
            assert not changed[:, others].any()
        found.append((logits[0], [memory[:, 2].clone() for memory in runner.caches.states.memory.values()]))
    (alone, states), (padded, others) = found
    torch.testing.assert_close(alone, padded)
    for state, other in zip(states, others, strict=True):
        torch.testing.assert_close(state, other)


@pytest.mark.parametrize("name", SOME)
def test_states_in_bf16_take_half_and_change_little(name: str, peers) -> None:
    """However a prompt is cut: a state is rounded wherever a step ends."""
    asked, params = prompts(6), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = {}
    for dtype, tokens in (("fp32", 96), ("bf16", 96), ("bf16", 7), ("bf16", 1)):
        llm = LLM(peers(name).folder, state_dtype=dtype, **ROOM | {"max_num_seqs": 4, "max_batched_tokens": tokens})
        states = next(memory for kind, memory in llm.caches.states.memory.items() if kind.endswith("states"))
        assert states.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        outputs = llm.generate(asked, params)
        read = [next(iter(one.values())).logprob for output in outputs for one in output.prompt_logprobs[1:]]
        found[dtype, tokens] = torch.tensor(read)
    exact = found.pop(("fp32", 96))
    for (_, tokens), rounded in found.items():
        assert (rounded - exact).abs().mean() < 0.02 * exact.std()
        # a prompt that one step reads has no rounded state before its last token
        assert tokens == 96 or not torch.equal(rounded, exact)


@pytest.mark.parametrize(
    ("name", "settings", "due"),
    [
        (
            "mamba2",
            {"approximate": LokiLayers([Loki.fit(torch.randn(50, 2, 8))] * 3)},
            "approximate is given and the model has m",
        ),
        ("llama", {"state_dtype": "bf16"}, 'state_dtype is "bf16" and no layer of the model has a state: leave state_dtype'),
        ("llama", {"state_every": 256}, "state_every is 256 and no layer of the model has a state: leave state_every out"),
        ("gpt2", {"state_share": 0.2}, r"state_share is 0\.2 and no layer of the model has a state: leave state_share out"),
        ("mamba", {"kv_dtype": "fp8"}, 'kv_dtype is "fp8" and no layer of the model keeps keys and values: leave kv_dtype out'),
        ("mamba2", {"kv_dtype": "fp8"}, 'kv_dtype is "fp8" and no layer of the model keeps keys and values: leave kv_dtype out'),
    ],
)
def test_what_does_not_go_with_a_state(name: str, settings: dict, due: str, peers) -> None:
    with pytest.raises(Unsupported, match=due) as refused:
        LLM(peers(name).folder, **ROOM | settings)
    assert "\n" not in str(refused.value)
