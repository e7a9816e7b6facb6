"""An engine that deals out the tokens of each sequence to two GPUs: collectives in CUDA graphs, and attention to a part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rooftile.engine import LLM, SamplingParams
from rooftile.models import ModelConfig
from rooftile.models.rotary import Rotary
from tests.gpu.test_ranks import ASKED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

# every second layer has a window
MODEL = ModelConfig(
    family="llama", vocab_size=1003, layers=2, hidden=256, heads=8, kv_heads=2, head_dim=64, ffn=512, max_len=1024,
    scale=64**-0.5, windows=(None, 64), rotary=Rotary(dim=64), dtype=torch.float32,
)  # fmt: skip
ROOM: dict[str, Any] = {"max_model_len": 1024, "num_blocks": 199, "max_num_seqs": 8, "max_batched_tokens": 300, "seed": 0}
PROMPTS = [[7 * n % 1003 for n in range(1, length)] for length in (3, 20, 90, 150, 4, 700)]


def answers(llm: LLM) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(PROMPTS, ASKED)]


def test_two_gpus_give_the_tokens_of_one() -> None:
    due = answers(LLM(MODEL, dtype="fp32", block_size=32, **ROOM))
    two = LLM(MODEL, dtype="fp32", context_parallel_size=2, **ROOM)
    assert two.engine.runner._graphs is not None
    for _ in range(2):
        assert answers(two) == due
    two.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_sixteen_bits(kv_dtype: str) -> None:
    """The likely tokens of a prompt on Hopper's kernels: of two GPUs as of one, but for what 16 bits round."""
    config = replace(MODEL, head_dim=128, heads=4, rotary=Rotary(dim=128), scale=128**-0.5, dtype=torch.bfloat16)
    asked, found = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), []
    for settings in ({"block_size": 32}, {"context_parallel_size": 2}):
        llm = LLM(config, dtype="bf16", kv_dtype=kv_dtype, **ROOM | settings)
        (output,) = llm.generate([PROMPTS[-1]], asked)
        assert output.prompt_logprobs is not None
        found.append(torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:] if each]))
        llm.close()
    assert (found[0] - found[1]).abs().max() < 0.1
