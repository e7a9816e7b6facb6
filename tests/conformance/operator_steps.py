"""An engine's steps and a training step under a mode: it sees every launch, and each in one call of an operator."""

from __future__ import annotations

import torch

import rooftile as rt
from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.models import Decoder
from rooftile.models.config import config_of
from tests.conformance.watching import watching
from tests.models.checkpoints import CONFIGS


def engine_steps(device: torch.device, dtype: torch.dtype, kv_dtype: str) -> None:
    """Prompts, decoding, answers that share blocks until they write, and sampling with everything that it has."""
    decoder = Decoder.random(config_of(CONFIGS["qwen3"]().to_dict(), "here"), dtype, device)
    llm = LLM(decoder, device=device, max_model_len=64, num_blocks=16, kv_dtype=kv_dtype, max_num_seqs=4, enforce_eager=True)
    params = SamplingParams(
        n=2, max_tokens=2, temperature=1.0, top_k=20, top_p=0.9, presence_penalty=0.5, logit_bias={3: 1.0}, seed=1,
        ignore_eos=True,
    )  # fmt: skip
    prompts = [list(range(5, 24)), [7, 8, 9]]
    with watching() as watch:
        found = llm.generate(prompts, params)
    watch.check_launches()
    assert watch.names == {
        "normalise", "add_norm", "gated", "write_kv_and_rotate", "attention_paged", "copy_blocks", "sample"
    }  # fmt: skip
    # nobody watches, and the tokens are the same
    assert [[x.token_ids for x in each.outputs] for each in llm.generate(prompts, params)] == [
        [x.token_ids for x in each.outputs] for each in found
    ]


def training_step(device: torch.device, dtype: torch.dtype) -> None:
    """Attention between two projections, forward, backward and an update."""
    torch.manual_seed(0)
    qkv, out = (torch.nn.Linear(32, n, device=device, dtype=dtype) for n in (96, 32))
    weights = [*qkv.parameters(), *out.parameters()]
    optimiser = torch.optim.SGD(weights, lr=0.1)
    x = torch.randn(2, 20, 32, device=device, dtype=dtype)

    def step() -> list[torch.Tensor]:
        optimiser.zero_grad()
        q, k, v = qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        # a head dim of 64, which every kernel takes
        q, k, v = (torch.nn.functional.pad(part, (0, 48)) for part in (q, k, v))
        out(rt.attention(q, k, v, rt.CAUSAL)[..., :16].flatten(2)).square().mean().backward()
        return [weight.grad.clone() for weight in weights]

    start = [weight.detach().clone() for weight in weights]
    with watching() as watch:
        found = step()
        optimiser.step()
    watch.check_launches()
    assert [call.name for call in watch.calls] == ["attention", "attention_backward"]
    with torch.no_grad():
        for weight, before in zip(weights, start, strict=True):
            weight.copy_(before)
    for grad, due in zip(step(), found, strict=True):
        torch.testing.assert_close(grad, due)
