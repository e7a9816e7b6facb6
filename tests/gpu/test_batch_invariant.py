"""`deterministic` on a GPU: the same bits in every batch, with CUDA graphs and without, whatever pads a graph's rows."""

from __future__ import annotations

import pytest
import torch

import rooftile as rt
from rooftile.engine.llm import LLM
from rooftile.fused import linear
from rooftile.models import Decoder
from rooftile.models.config import config_of
from tests.engine.asking import ROOM, assert_clean
from tests.engine.test_batch_invariant import ASKED, PARAMS, bits
from tests.models.checkpoints import CONFIGS

pytestmark = pytest.mark.gpu

BESIDE = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "in chunks": {"max_batched_tokens": 13},
    "preempted, in chunks": {"num_blocks": 9, "max_batched_tokens": 10},
    "in blocks of 8, three at once": {"block_size": 8, "max_num_seqs": 3},
}


def decoder_of(name: str, dtype: torch.dtype) -> Decoder:
    """A decoder whose weights are so large that a sum in another order shows."""
    decoder = Decoder.random(config_of(CONFIGS[name]().to_dict(), "here"), dtype, "cuda", seed=1)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.ndim > 1:
                weight.mul_(10)
    return decoder


@pytest.mark.parametrize("how", BESIDE)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("gemma2", torch.bfloat16), ("qwen3", torch.float16)],
    ids=str,
)
def test_answers_are_the_same_whatever_runs_beside_them(name: str, dtype: torch.dtype, how: str) -> None:
    decoder = decoder_of(name, dtype)
    # one answer at a time runs the graph of one row; 17 run one of 24 rows, seven of them padding
    alone = LLM(decoder, **ROOM, deterministic=True, enable_prefix_caching=False)
    due = [bits(alone.generate([prompt], params))[0] for prompt, params in zip(ASKED, PARAMS, strict=True)]
    llm = LLM(decoder, **ROOM | BESIDE[how], deterministic=True)
    assert bits(llm.generate(ASKED, PARAMS)) == due
    assert bits(llm.generate(ASKED[::-1], PARAMS[::-1]))[::-1] == due
    assert_clean(llm)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_long_prompts(kv_dtype: str) -> None:
    """Several chunks of 1,024 keys: in one program, in several, and with a window that begins in the middle."""
    config = config_of(CONFIGS["mistral"]().to_dict() | {"max_position_embeddings": 4096, "sliding_window": 1500}, "here")
    decoder = Decoder.random(config, torch.bfloat16, "cuda", seed=2)
    settings = {"max_model_len": 4096, "num_blocks": 2000, "deterministic": True, "kv_dtype": kv_dtype}
    asked = [[(7 * n + i) % 97 for i in range(length)] for n, length in enumerate((3000, 1, 1025, 40, 2047))]
    params = rt.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
    alone = LLM(decoder, **settings)
    due = [bits(alone.generate([prompt], params))[0] for prompt in asked]
    for more in ({}, {"max_batched_tokens": 333}):
        llm = LLM(decoder, **settings | more)
        assert bits(llm.generate(asked * 12, params)) == due * 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inner", "out"), [(40, 97), (4096, 4096), (4096, 12288), (1024, 32000), (129, 33)])
def test_products(inner: int, out: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(1000, inner, device="cuda").to(dtype), torch.randn(out, inner, device="cuda").to(dtype)
    bias = torch.randn(out, device="cuda").to(dtype)
    found = linear(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    eps = torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= eps * exact.abs() + 1e-6 * inner).all()
    for rows in (slice(0, 1), slice(63, 65), slice(100, 356), slice(999, 1000)):
        assert torch.equal(linear(x[rows], weight, bias), found[rows])
    order = torch.randperm(1000, device="cuda")
    assert torch.equal(linear(x[order], weight, bias), found[order])


def test_what_no_kernel_has_is_refused() -> None:
    with pytest.raises(rt.Unsupported, match="float64"):
        LLM(decoder_of("llama", torch.float64), **ROOM, deterministic=True)
