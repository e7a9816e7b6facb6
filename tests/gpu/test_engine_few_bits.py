"""`LLM(weights=...)` on a GPU: every token's log probability is that of the same weights on a CPU in fp32."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rooftile.engine import LLM, AsyncEngine, SamplingParams
from rooftile.engine.requests.output import RequestOutput
from tests.engine.asking import ROOM, assert_clean, prompts
from tests.models.quantised import plain, quantised

pytestmark = pytest.mark.gpu

FORMATS = ["fp8", "fp8_tile", "int8", "w8", "int4", "int4:32", "mxfp8", "mxfp4", "nvfp4"]
ASKED = prompts(24)
WORDS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
GPU = {"dtype": torch.bfloat16, "device": "cpu"} | ROOM
# nats, in the mean and at most: bf16 rounds each of some twenty results on the way to a logit, and an activation that it moves
# past the middle between two FP8 numbers changes by 6 %
NEAR, NEAR_FP8 = (0.03, 0.4), (0.15, 0.8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    plain(path, hidden_size=256, intermediate_size=512, initializer_range=0.06)
    return path


def told(outputs: list[RequestOutput]) -> list[float]:
    """The log probabilities of the answers' tokens, as the engine that chose them told them."""
    found = []
    for output in outputs:
        assert output.error is None
        answer = output.outputs[0]
        assert len(answer.token_ids) == 12
        assert answer.logprobs is not None
        found += [row[token].logprob for token, row in zip(answer.token_ids, answer.logprobs, strict=True)]
    return found


def due(llm: LLM, outputs: list[RequestOutput]) -> list[float]:
    """The log probabilities of the same tokens by another engine, which reads prompt and answer as one prompt."""
    texts = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(ASKED, outputs, strict=True)]
    found = []
    for prompt, output in zip(ASKED, llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0)), strict=True):
        assert output.prompt_logprobs is not None
        rows = output.prompt_logprobs[len(prompt) :]
        found += [row[token].logprob for token, row in zip(output.prompt_token_ids[len(prompt) :], rows, strict=True) if row]
    return found


def assert_near(found: list[float], wanted: list[float], weights: str) -> None:
    mean, most = NEAR_FP8 if weights in ("fp8", "fp8_tile") else NEAR
    apart = (torch.tensor(found) - torch.tensor(wanted)).abs()
    assert len(found) == len(wanted) == 12 * len(ASKED)
    assert apart.mean() < mean
    assert apart.max() < most


@pytest.mark.parametrize("weights", FORMATS)
def test_graphs_and_single_kernels_say_what_a_cpu_says(weights: str, folder: Path) -> None:
    here = LLM(folder, weights=weights, dtype=torch.float32, device="cpu", **ROOM)
    for how in ({}, {"enforce_eager": True}, {"max_batched_tokens": 13}):
        llm = LLM(folder, weights=weights, **GPU, **how)
        outputs = llm.generate(ASKED, WORDS)
        assert_near(told(outputs), due(here, outputs), weights)
        assert_clean(llm)


def test_other_weights_would_be_seen(folder: Path) -> None:
    """Without it the tolerances of this file could hide weights that are not quantised."""
    here = LLM(folder, weights="mxfp4", dtype=torch.float32, device="cpu", **ROOM)
    outputs = LLM(folder, **GPU).generate(ASKED, WORDS)
    with pytest.raises(AssertionError):
        assert_near(told(outputs), due(here, outputs), "fp8")


@pytest.mark.parametrize("weights", ["fp8", "int8", "int4"])
def test_a_cache_in_fp8(weights: str, folder: Path) -> None:
    here = LLM(folder, weights=weights, dtype=torch.float32, device="cpu", kv_dtype="fp8", **ROOM)
    outputs = LLM(folder, weights=weights, kv_dtype="fp8", **GPU).generate(ASKED, WORDS)
    # keys that bf16 moves past the middle between two numbers differ, too
    assert_near(told(outputs), due(here, outputs), "fp8")


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_many_callers_at_once(weights: str, folder: Path) -> None:
    llm = LLM(folder, weights=weights, **GPU)

    async def main() -> list[RequestOutput]:
        async with AsyncEngine(llm) as engine:
            return await asyncio.gather(*(engine.complete(prompt, WORDS) for prompt in ASKED))

    outputs = asyncio.run(main())
    assert_near(told(outputs), due(LLM(folder, weights=weights, dtype=torch.float32, device="cpu", **ROOM), outputs), weights)
    assert_clean(llm)


@pytest.mark.parametrize("kind", ["ct int4, act-order", "gptq", "awq", "ct mxfp4"])
def test_checkpoints_of_others(kind: str, tmp_path: Path) -> None:
    quantised(kind, tmp_path)
    here = LLM(tmp_path, dtype=torch.float32, device="cpu", **ROOM)
    outputs = LLM(tmp_path, **GPU).generate(ASKED, WORDS)
    assert_near(told(outputs), due(here, outputs), kind)
