"""Tables of rotary positions, to the bit as Transformers computes them; a lookup is one operation of fixed shape."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rooftile.errors import InvalidInput
from rooftile.models.config import config_of
from rooftile.models.rotary import Rotary
from tests.models.checkpoints import DYNAMIC, LINEAR, LLAMA3, SMALL, THETA, YARN, YARN_IN_FULL, YARN_SHORT

LONG_LLAMA3 = LLAMA3 | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192}
LONG_YARN = YARN | {"factor": 3.0, "rope_theta": 1_000_000.0, "original_max_position_embeddings": 32_768}
# a ramp of no length
STEEP = YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}
SHRUNK = YARN | {"factor": 1.0}
# within its training length, and beyond it
SHORT, LONG = (
    {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": trained,
        "short_factor": [1 + n / 32 for n in range(32)], "long_factor": [1 + n * n / 32 for n in range(32)],
    } for trained in (512, 100)
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "rope",
    [THETA, LINEAR, DYNAMIC, LLAMA3, LONG_LLAMA3, YARN, YARN_IN_FULL, YARN_SHORT, LONG_YARN, STEEP, SHRUNK, SHORT, LONG],
    ids=lambda rope: str(rope)[:120],
)
def test_tables_are_those_of_transformers_to_the_bit(rope: dict, dtype: torch.dtype) -> None:
    config = transformers.LlamaConfig(**SMALL | {"head_dim": 64, "max_position_embeddings": 512}, rope_parameters=dict(rope))
    positions = torch.tensor([0, 1, 2, 31, 32, 33, 100, 511])
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=dtype), positions[None])
    ours = config_of(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "here")
    assert ours.rotary is not None
    table = ours.rotary.table(512, dtype=dtype)
    assert table.shape == (512, 64)
    assert table.dtype == dtype
    for waves, due in zip(table[positions].chunk(2, dim=-1), (cos, sin), strict=True):
        assert torch.equal(torch.cat((waves, waves), dim=-1), due[0])


def test_dynamic_waves_are_stretched_for_the_longest_sequence() -> None:
    """Transformers stretches them when it meets a longer sequence; all positions of that sequence then have the same base."""
    config = transformers.LlamaConfig(**SMALL | {"head_dim": 64, "max_position_embeddings": 100}, rope_parameters=dict(DYNAMIC))
    ours = config_of(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, "here")
    assert (ours.max_len, ours.rotary.original_len) == (400, 100)
    for length in (64, 100, 101, 400):
        positions = torch.arange(length)
        cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), positions[None])
        table = ours.rotary.table(length, dtype=torch.float32)
        torch.testing.assert_close(torch.cat((table, table), dim=-1)[:, :32], cos[0][:, :32], rtol=0, atol=1e-4)
        torch.testing.assert_close(table[:, 32:], sin[0][:, :32], rtol=0, atol=1e-4)
    assert not torch.equal(ours.rotary.frequencies(101), ours.rotary.frequencies(100))
    with pytest.raises(InvalidInput, match=r"rotary.dim is 2 with dynamic scaling; must be at least 4"):
        Rotary(dim=2, scaling="dynamic", original_len=8)


def test_factors_are_checked() -> None:
    with pytest.raises(InvalidInput, match=r"rotary.short_factors are \(\); must be 8 finite numbers above 0, one for each pair"):
        Rotary(dim=16, scaling="longrope", original_len=4, long_factors=(1.0,) * 8)


def test_yarn_reaches_as_far_as_it_stretches() -> None:
    values = transformers.Qwen2Config(**SMALL).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    values |= {"rope_parameters": None, "rope_scaling": YARN | {"original_max_position_embeddings": 128}}
    assert config_of(values, "here").max_len == 512
    assert config_of(values | {"max_position_embeddings": 1024}, "here").max_len == 1024


def test_a_turn_keeps_lengths() -> None:
    table = Rotary(dim=16).table(50, dtype=torch.float32)
    cos, sin = table.chunk(2, dim=-1)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones(50, 8))
    assert table[1, 0].item() == pytest.approx(math.cos(1))
