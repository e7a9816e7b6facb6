"""Models with latents in the engine on a GPU, in graphs and a step ahead: the tokens that it finds on a CPU."""

from __future__ import annotations

import pytest
import torch

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.mixers.latent import kernels
from rooftile.models import Decoder
from rooftile.models.config import config_of
from rooftile.runtime.launch import observe
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts
from tests.models import latent

pytestmark = pytest.mark.gpu
HOW = [{}, {"max_model_len": 96, "num_blocks": 40}, {"enforce_eager": True}, {"max_batched_tokens": 13}]
NAMES = ["deepseek_v3", "deepseek_v2, greedy"]


def engines(name: str, dtype: torch.dtype = torch.float32, **settings) -> tuple[LLM, LLM]:
    """The same weights on a CPU in fp32, and on the GPU."""
    decoder = Decoder.random(config_of(latent.CONFIGS[name]().to_dict(), "here"), torch.float32, "cpu", seed=1)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.ndim > 1:
                weight.mul_(10)
    there = Decoder(decoder.config, dtype=dtype, device="cuda")
    there.load_state_dict(decoder.state_dict())
    return LLM(decoder, block_size=8, **ROOM), LLM(there, block_size=8, **ROOM | settings)


@pytest.mark.parametrize("settings", HOW, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_the_cpus(name: str, settings: dict) -> None:
    here, there = engines(name, **settings)
    assert (there.engine.runner._graphs is None) == ("enforce_eager" in settings)
    asked, seen = prompts(40), set()
    due = here.generate(asked, GREEDY)
    with observe(seen.add):
        found = there.generate(asked, GREEDY)
    assert "enforce_eager" not in settings or "_decode" in seen
    assert [output.error for output in found] == [None] * 40
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(due, found, strict=True)]
    # a sum in another order may turn the order of two tokens that are nearly alike
    assert sum(same) >= 38
    assert max(len(set(output.outputs[0].token_ids)) for output in due) > 4
    assert_clean(there)


def test_prefixes_forks_and_beams() -> None:
    here, there = engines("deepseek_v3")
    prefix = prompts(1, seed=3)[0] * 4
    asked = [prefix[:45], [*prefix[:40], 5, 6, 7], prefix[:41], prefix[:45]]
    for params in (GREEDY, SamplingParams(n=3, seed=11, max_tokens=12), SamplingParams(beam_width=3, n=2, max_tokens=12)):
        for prompt in asked:
            (due,), (found,) = here.generate([prompt], params), there.generate([prompt], params)
            assert found.num_cached_tokens == due.num_cached_tokens
            same = [a.token_ids == b.token_ids for a, b in zip(due.outputs, found.outputs, strict=True)]
            assert sum(same) >= len(same) - 1
    assert_clean(there)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("H", "longest", "B"), [(128, 3000, 3), (16, 700, 40), (128, 200, 300)])
def test_sums_are_those_of_the_definition(H: int, longest: int, B: int, dtype: torch.dtype) -> None:
    """At DeepSeek's sizes, whole and in parts."""
    lengths = torch.randint(0, longest + 1, (B,), dtype=torch.int32, device="cuda")
    lengths[0], lengths[1] = longest, 0
    columns = -(-longest // 16)
    latents = torch.randn(B * columns, 2, 16, 576, device="cuda").to(dtype)[:, 1, :, None]
    table = torch.randperm(B * columns, device="cuda").view(B, columns).int()
    q, turning = torch.randn(B, H, 512, device="cuda").to(dtype), torch.randn(B, H, 64, device="cuda").to(dtype)
    found = kernels.attend(q, turning, latents, table, lengths, 64, 0.05)
    rows = [0, 1, B - 1]
    due = latent.sums_of_latents(q[rows], turning[rows], latents, table[rows], lengths[rows], 0.05)
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}[dtype]
    torch.testing.assert_close(found[rows].double(), due, rtol=limit, atol=limit)
    assert found.isfinite().all()
