"""How many blocks an engine takes on a GPU, with the device's memory as it is said to be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rooftile.engine import LLM, EngineConfig
from rooftile.engine.caches import memory
from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.mixers.exact.mixer import ExactMixer
from rooftile.engine.mixers.recurrent.mamba2 import Mamba2Mixer
from rooftile.errors import InvalidInput
from rooftile.models import Decoder, Mamba2Sizes, ModelConfig
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
    settings = {"utilization": 0.9, "longest": longest, "num_blocks": None, "state_share": 0.1}
    return memory.what_fits(decoder, layout, [exact], dtype, load, **settings).blocks


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


# Mamba-2 of 2.7B: a sequence takes 64 x (80 x 64 x 128 x 4 + 5,376 x 3 x 2) bytes
SEQUENCE = 64 * (80 * 64 * 128 * 4 + 5376 * 3 * 2)
# a block of 32 layers of attention beside it
PAGE = 32 * 2 * 16 * 8 * 128 * 2


@pytest.fixture
def layers() -> Mamba2Mixer:
    config = ModelConfig(
        family="mamba2", vocab_size=VOCABULARY, layers=64, hidden=2560, max_len=1 << 18, windows=(None,) * 64, rotary=None,
        mixers=("mamba2",) * 64, feed_forwards=(None,) * 64, mamba2=Mamba2Sizes(heads=80, head_dim=64), dtype=torch.bfloat16,
    )  # fmt: skip
    return Mamba2Mixer(config, tuple(range(64)), EngineConfig())


def fit_of(
    decoder: SimpleNamespace, mixers: list, answers: int, *, prefixes: bool = True, longest: int = 1 << 18,
    num_blocks: int | None = None, share: float = 0.1,
) -> memory.Fit:  # fmt: skip
    layout = CacheLayout(16, tuple(spec for mixer in mixers for spec in mixer.specs()))
    load = PeakLoad(answers, 8192, prefixes=prefixes)
    settings = {"utilization": 0.9, "longest": longest, "num_blocks": num_blocks, "state_share": share}
    return memory.what_fits(decoder, layout, mixers, torch.bfloat16, load, **settings)


def test_states_bound_how_many_answers_run(decoder, layers, monkeypatch) -> None:
    """Blocks take no memory; a row is for padding, one for zeros, and those for prefixes have a tenth of the room."""
    for free, prefixes in ((70 * GB, True), (30 * GB, True), (30 * GB, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 * GB))
        written = 4 * 8192 * (2 * 5376 + 5120) * 2 + 2 * 512 * SEQUENCE // 64
        tables = 513 * (VOCABULARY * (4 + 1 + 4) + VOCABULARY // 8)
        room = free - 8 * GB - WORKING - memory.SPARE_BYTES - tables - written
        fit = fit_of(decoder, [layers], 512, prefixes=prefixes)
        assert fit.kept == (room // 10 // SEQUENCE if prefixes else 0)
        assert fit.answers == room // SEQUENCE - 2 - fit.kept
        # 131,072 blocks are 2 million tokens at once
        assert fit.blocks == 1 << 17
    few = fit_of(decoder, [layers], 4)
    # with smaller tables there is more room
    assert (few.answers, few.kept) == (4, 10)
    # no more are kept than there are blocks after which to keep one
    assert fit_of(decoder, [layers], 4, longest=32)[::2] == (8, 8)
    # one answer runs, however large the share is
    assert fit_of(decoder, [layers], 512, share=0.999).answers == 1
    assert fit_of(decoder, [layers], 512, share=1e-9).kept == 1


def test_beside_pages_states_have_half_the_room(decoder, layers) -> None:
    exact = ExactMixer(decoder.config, tuple(range(64, 96)), EngineConfig())
    fit = fit_of(decoder, [layers, exact], 512, longest=1 << 17)
    pages = fit.blocks * PAGE
    states = (fit.answers + fit.kept + 2) * SEQUENCE
    assert 0 <= pages - states < 3 * SEQUENCE
    assert 0 <= 0.1 * (pages + states) - fit.kept * SEQUENCE < 2 * SEQUENCE


def test_states_have_what_blocks_that_were_asked_for_leave(decoder, layers) -> None:
    """... also where it is not one state, which is said with the arithmetic."""
    exact = ExactMixer(decoder.config, tuple(range(64, 96)), EngineConfig())
    whole = fit_of(decoder, [layers, exact], 512, longest=1 << 17)
    room = whole.blocks * PAGE + (whole.answers + whole.kept + 2) * SEQUENCE
    for num_blocks in (10, whole.blocks // 2, whole.blocks, whole.blocks * 3 // 2):
        fit = fit_of(decoder, [layers, exact], 512, longest=1 << 17, num_blocks=num_blocks)
        assert fit.blocks == num_blocks
        assert abs(room - num_blocks * PAGE - (fit.answers + fit.kept + 2) * SEQUENCE) < 2 * SEQUENCE
        assert fit.kept == min(num_blocks, whole.kept)
    due = (
        r"no memory for a state: of \d+\.\d GB for caches [\d,]+ blocks \(num_blocks\) take \d+\.\d, and one answer takes 4 "
        r"states of 170 MB \(64 layers x 80 x 64 x 128 x 4 bytes \+ 64 layers x 5,376 x 3 x 2 bytes\) \(also its beginning, "
        r"padding and prefixes\): make num_blocks smaller$"
    )
    almost = (room - 3 * SEQUENCE) // PAGE
    with pytest.raises(InvalidInput, match=due) as refused:
        fit_of(decoder, [layers, exact], 512, longest=1 << 17, num_blocks=almost)
    assert "\n" not in str(refused.value)
    # without prefixes three rows are enough
    assert fit_of(decoder, [layers, exact], 512, longest=1 << 17, num_blocks=almost, prefixes=False) == (almost, 1, 0)


def test_no_room_for_one_state_is_said_with_the_arithmetic(decoder, layers, monkeypatch) -> None:
    # the states of the chunks of one answer's step, too
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (12 * GB, 80 * GB))
    due = (
        r"no memory for a cache: of 80\.0 GB 12\.0 are free, .* one answer takes 4 states of 170 MB \(64 layers x 80 x 64 x 128 "
        r"x 4 bytes \+ 64 layers x 5,376 x 3 x 2 bytes\) \(also its beginning, padding and prefixes\): make"
    )
    with pytest.raises(InvalidInput, match=due) as refused:
        fit_of(decoder, [layers], 64)
    assert "\n" not in str(refused.value)


def test_a_cpu_runs_one_answer_in_any_case(layers) -> None:
    host = SimpleNamespace(embedding=SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16))
    # a GiB has 6 rows: three answers, padding, zeros, and one for prefixes
    assert fit_of(host, [layers], 256)[1:] == (3, 1)
    assert fit_of(host, [layers], 256, num_blocks=7) == (7, 3, 1)
    larger = replace(layers.shape, mamba2=Mamba2Sizes(heads=512, head_dim=64))
    assert fit_of(host, [Mamba2Mixer(larger, tuple(range(64)), EngineConfig())], 256).answers == 1


def test_states_that_cannot_be_allocated(peers, monkeypatch) -> None:
    def refuses(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(CacheLayout, "allocate", refuses)
    due = (
        r"10 blocks \(num_blocks\) of 0 bytes take 0\.0 GB, with 13 states of .* \(3 layers x 8 x 10 x 12 x 4 bytes \+ 3 layers x"
    )
    with pytest.raises(InvalidInput, match=due):
        LLM(peers("mamba2").folder, num_blocks=10, max_num_seqs=1)


def test_the_memory_line_has_states_and_their_arithmetic(peers) -> None:
    whole = LLM(peers("mamba2").folder, num_blocks=10, max_num_seqs=4)
    one = "3 layers x 8 x 10 x 12 x 4 bytes + 3 layers x 104 x 3 x 4 bytes"
    assert str(whole.caches) == f"6 states of 15.3 kB ({one}) for answers = 91.6 kB, and 10 kept = 153 kB"
    assert whole.caches.nbytes == 16 * 3 * (8 * 10 * 12 * 4 + 104 * 3 * 4)
    hybrid = LLM(peers("bamba").folder, num_blocks=10, max_num_seqs=4)
    assert str(hybrid.caches).startswith(
        "10 blocks of 16 tokens, 160 in all: 10 x 16 x 1 layers x 2 x 1 heads x 20 dims x 4 bytes"
    )
    assert ", and 6 states of 10.2 kB (2 layers x" in str(hybrid.caches)
