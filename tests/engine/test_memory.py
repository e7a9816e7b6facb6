"""How many blocks an engine takes on a GPU, with the device's memory as it is said to be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rooftile.engine import EngineConfig
from rooftile.engine.caches import memory
from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.mixers.exact.mixer import ExactMixer
from rooftile.errors import InvalidInput
from rooftile.models import Decoder
from rooftile_lab.bench.models import MODELS

GB = 10**9
WORKING = 2 * GB
VOCABULARY = 256_000
# counts, marks, biases and masks of 256 answers and a row of padding: 0.60 GB
TABLES = 257 * (VOCABULARY * (4 + 1 + 4) + VOCABULARY // 8)


@pytest.fixture
def decoder(monkeypatch) -> SimpleNamespace:
    """32 layers with 8 heads of 128 in bf16 take 4,096 bytes per token and layer. 70 GB of 80 are free, and a step takes 2."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GB, 80 * GB))
    monkeypatch.setattr(memory, "_working_bytes", lambda *_: WORKING)
    config = SimpleNamespace(layers=32, heads=32, kv_heads=8, head_dim=128, vocab_size=VOCABULARY)
    return SimpleNamespace(config=config, embedding=SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16))


def blocks_of(decoder: SimpleNamespace, size: int, dtype: torch.dtype, batched: int, longest: int) -> int:
    """The blocks of a model whose layers all have exact attention."""
    exact = ExactMixer(decoder.config, tuple(range(32)), EngineConfig(block_size=size))
    layout, load = CacheLayout(size, exact.specs()), PeakLoad(256, batched)
    return memory.blocks_that_fit(decoder, layout, [exact], dtype, load, utilization=0.9, longest=longest)


@pytest.mark.parametrize(
    ("size", "dtype", "batched", "max_len", "copied"),
    [
        (16, torch.bfloat16, 8191, 131_072, 0),
        (16, torch.bfloat16, 8192, 131_072, 131_072 * 4096),
        (16, torch.bfloat16, 16_384, 131_072, 1 << 30),
        # 32 prompts of 64 tokens read from copies of all before them
        (8, torch.bfloat16, 2048, 4096, 32 * 4096 * 4096),
        (8, torch.bfloat16, 1 << 20, 2048, 1 << 30),
        (128, torch.bfloat16, 16_384, 131_072, 0),
        (16, torch.float8_e4m3fn, 2048, 131_072, 1 << 30),
    ],
)
def test_what_prompts_are_copied_to_stays_free(decoder, size: int, dtype, batched: int, max_len: int, copied: int) -> None:
    blocks = blocks_of(decoder, size, dtype, batched, max_len)
    each = 32 * 2 * size * 8 * (128 * 2 if dtype == torch.bfloat16 else 128 + 4)
    room = 70 * GB - 8 * GB - WORKING - memory.SPARE_BYTES - copied - TABLES
    assert blocks == room // each


def test_a_step_takes_what_it_gives_back(monkeypatch) -> None:
    """Layouts that a library makes of 2:4 weights stay: they are no longer free, and would be counted twice."""
    left = iter([100, 100 + 30])
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(left))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + 30 + 500)
    model = Decoder.random(MODELS["tiny"], torch.float32, "cpu")
    assert memory._working_bytes(model, 4, 2) == 500


def test_no_room_is_said_with_the_arithmetic(decoder, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GB, 80 * GB))
    with pytest.raises(InvalidInput, match=r"of 80\.0 GB 10\.0 are free, 10% stay so"):
        blocks_of(decoder, 16, torch.bfloat16, 2048, 4096)
