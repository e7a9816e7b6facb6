"""The engine on a GPU, with graphs and a step ahead: the tokens that it finds on a CPU, and no waiting for itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rooftile.engine.async_engine import AsyncEngine
from rooftile.engine.llm import LLM
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.models import Decoder
from rooftile.models.config import config_of
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts
from tests.models.checkpoints import CONFIGS

pytestmark = pytest.mark.gpu


def engines(name: str, **settings) -> tuple[LLM, LLM]:
    """The same weights on a CPU and on the GPU, in fp32."""
    config = config_of(CONFIGS[name]().to_dict(), "here")
    decoder = Decoder.random(config, torch.float32, "cpu", seed=1)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.ndim > 1:
                weight.mul_(10)
    there = Decoder(config, dtype=torch.float32, device="cuda")
    there.load_state_dict(decoder.state_dict())
    return LLM(decoder, **ROOM), LLM(there, **ROOM | settings)


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 14}, {"enforce_eager": True}, {"max_batched_tokens": 13}], ids=str)
@pytest.mark.parametrize("name", ["llama, llama3", "mistral", "qwen3", "gemma2", "gpt2"])
def test_greedy_tokens_are_the_cpus(name: str, settings) -> None:
    here, there = engines(name, **settings)
    asked = prompts(40)
    due, found = here.generate(asked, GREEDY), there.generate(asked, GREEDY)
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(due, found, strict=True)]
    # a sum in another order may turn the order of two tokens that are nearly alike
    assert sum(same) >= 39
    assert_clean(there)


def test_samples_and_logprobs_are_the_cpus() -> None:
    here, there = engines("llama")
    asked = prompts(30)
    params = [
        SamplingParams(n=1 + n % 3, temperature=0.7, seed=n, top_p=0.95, top_k=20, presence_penalty=0.3, logprobs=2,
                       max_tokens=15, min_tokens=3)
        for n in range(30)
    ]  # fmt: skip
    due, found = here.generate(asked, params), there.generate(asked, params)
    same = total = 0
    for a, b in zip(due, found, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            total += 1
            if x.token_ids == y.token_ids:
                same += 1
                assert y.cumulative_logprob == pytest.approx(x.cumulative_logprob, abs=1e-2)
    assert same >= total - 2
    assert_clean(there)


def test_beams_are_the_cpus() -> None:
    here, there = engines("llama")
    params = SamplingParams(n=2, beam_width=4, max_tokens=12)
    asked = prompts(8)
    due, found = here.generate(asked, params), there.generate(asked, params)
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(due, found, strict=True)]
    assert sum(same) >= 7
    assert_clean(there)


def test_many_callers_get_the_tokens_of_one() -> None:
    """The thread of an AsyncEngine replays graphs that another has captured."""
    here, there = engines("llama")
    due = here.generate(prompts(20), GREEDY)

    async def ask() -> list[RequestOutput]:
        async with AsyncEngine(there) as engine:
            return await asyncio.gather(*(engine.complete(prompt, GREEDY) for prompt in prompts(20)))

    found = asyncio.run(asyncio.wait_for(ask(), 120))
    assert sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(due, found, strict=True)) >= 19
    assert_clean(there)


def test_bf16_answers_are_likely_ones() -> None:
    """Logprobs of a model in bf16 are close to those of the same tokens in fp32."""
    here, _ = engines("qwen3")
    decoder = Decoder(here.engine.runner.decoder.config, dtype=torch.bfloat16, device="cuda")
    decoder.load_state_dict(here.engine.runner.decoder.state_dict())
    there = LLM(decoder, **ROOM)
    for prompt, output in zip(prompts(10), there.generate(prompts(10), GREEDY), strict=True):
        tokens = output.outputs[0].token_ids
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (again,) = here.generate([[*prompt, *tokens]], params)
        assert again.prompt_logprobs is not None
        told = again.prompt_logprobs[len(prompt) :]
        assert all(row is not None and row[token].rank <= 3 for row, token in zip(told, tokens, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_itself() -> None:
    """Once the graphs are there, nothing of a step waits but for the tokens of the one before."""
    _, there = engines("llama")
    params = SamplingParams(temperature=0.5, max_tokens=30, ignore_eos=True)
    there.generate(prompts(6), params)
    engine = there.engine
    for prompt in prompts(6):
        engine.add(prompt, params)
    for _ in range(4):
        engine.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(5):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    while not engine.idle:
        engine.step()
    assert_clean(there)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_llm_is_where_it_was_put() -> None:
    """Whatever device is current where it is made and asked."""
    llm, _ = engines("llama")
    config = llm.engine.runner.decoder.config
    there = Decoder(config, dtype=torch.float32, device="cuda:1")
    there.load_state_dict(llm.engine.runner.decoder.state_dict())
    assert torch.cuda.current_device() == 0
    other = LLM(there, **ROOM)
    due = [output.outputs[0].token_ids for output in llm.generate(prompts(9), GREEDY)]
    assert [output.outputs[0].token_ids for output in other.generate(prompts(9), GREEDY)] == due


PROGRAM = """
import torch
from rooftile_lab.bench.models import decoder_named
from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
llm = LLM(decoder_named("tiny", torch.device("cuda")), max_model_len=256)
answers = llm.generate([[1, 2, 3], [4] * 100], SamplingParams(max_tokens=5, ignore_eos=True))
print(*(len(answer.outputs[0].token_ids) for answer in answers))
"""


def test_a_process_of_its_own_starts_cold(tmp_path: Path) -> None:
    """Several threads compile, none of which finds anything imported or made by somebody before."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["5", "5"]
