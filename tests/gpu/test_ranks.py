"""An engine on two GPUs: NCCL in CUDA graphs, and the end of a rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.ranks.failures import RankEnded
from rooftile.models import Decoder, ModelConfig
from rooftile.models.config import config_of
from rooftile.models.rotary import Rotary
from rooftile_lab.bench.adapter_rates import write_adapter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

MODEL = ModelConfig(
    family="llama", vocab_size=1003, layers=2, hidden=256, heads=8, kv_heads=2, head_dim=64, ffn=512, max_len=512,
    scale=64**-0.5, windows=(None,) * 2, rotary=Rotary(dim=64), dtype=torch.float32,
)  # fmt: skip
ROOM: dict[str, Any] = {"dtype": "fp32", "max_model_len": 256, "num_blocks": 99, "max_num_seqs": 8, "seed": 0}
PROMPTS = [[7 * n % 1003 for n in range(1, length)] for length in (3, 20, 90, 150, 4, 40)]
ASKED = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
    SamplingParams(n=3, seed=4, max_tokens=40, ignore_eos=True),
    SamplingParams(beam_width=3, n=2, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=40, ignore_eos=True),
    SamplingParams(frequency_penalty=0.5, top_k=20, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
]


def answers(llm: LLM) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in llm.generate(PROMPTS, ASKED)]


def test_two_gpus_give_the_tokens_of_one_and_end_with_a_sentence() -> None:
    due = answers(LLM(MODEL, **ROOM))
    two = LLM(MODEL, tensor_parallel_size=2, **ROOM)
    assert two.engine.runner._graphs is not None
    # more than 256 steps, after which the ranks compare their tokens
    for _ in range(7):
        assert answers(two) == due
    runner: Any = two.engine.runner
    (worker,) = runner.leader.processes._processes
    stream = two.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    worker.kill()
    with pytest.raises(RankEnded, match=r"^rank 1 of 2 has ended \(signal 9\)$"):
        for _ in stream:
            pass
    two.close()
    # the GPU of this process goes on
    assert answers(LLM(MODEL, enforce_eager=True, **ROOM)) == due


def test_two_gpus_have_adapters(tmp_path: Path) -> None:
    """Loaded while it serves, in graphs of all ranks; each holds its part."""
    for name, rank in (("a", 5), ("b", 40)):
        write_adapter(Decoder(MODEL, dtype=MODEL.dtype, device="meta"), tmp_path / name, rank)
        # numbers that change the answers
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 400 * rank}))
    room: dict[str, Any] = ROOM | {"max_adapters": 2, "max_adapter_rank": 40}
    names, found = ["a", "b", None] * 2, []
    for settings in ({}, {"tensor_parallel_size": 2}):
        llm = LLM(MODEL, **room, **settings)
        assert llm.engine.runner._graphs is not None
        plain = answers(llm)
        for name in ("a", "b"):
            llm.load_adapter(name, tmp_path / name)
        outputs = llm.generate(PROMPTS, ASKED, adapter=names)
        found.append([[answer.token_ids for answer in output.outputs] for output in outputs])
        assert [one == other for one, other in zip(found[-1], plain, strict=True)] == [name is None for name in names]
        llm.close()
    assert found[0] == found[1]


@pytest.mark.sweep
def test_two_gpus_without_graphs() -> None:
    eager: dict[str, Any] = ROOM | {"enforce_eager": True}
    two = LLM(MODEL, tensor_parallel_size=2, **eager)
    assert answers(two) == answers(LLM(MODEL, **eager))
    two.close()


def test_two_gpus_that_hold_whole_experts() -> None:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    made = transformers.MixtralConfig(**sizes, vocab_size=1003, max_position_embeddings=512, num_local_experts=4)
    config = config_of(made.to_dict(), "here")
    due = answers(LLM(config, **ROOM))
    two = LLM(config, tensor_parallel_size=2, enable_expert_parallel=True, **ROOM)
    assert two.engine.runner.decoder.config.experts.held == 2
    assert answers(two) == due
    two.close()
