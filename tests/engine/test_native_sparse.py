"""Native Sparse Attention in the engine: the tokens of one pass without a cache, however steps are cut and blocks are shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rooftile.approximate import Loki, LokiLayers
from rooftile.engine import LLM, EngineConfig, SamplingParams
from rooftile.engine.caches.layout import CacheLayout, PeakLoad
from rooftile.engine.mixers.layers import Layers
from rooftile.engine.mixers.loki.calibration import calibrate
from rooftile.engine.mixers.mixer import Largest
from rooftile.engine.mixers.native_sparse import mixer as native_sparse
from rooftile.engine.mixers.native_sparse.step import COMPRESSED
from rooftile.engine.mixers.registry import mixers_of
from rooftile.engine.mixers.step import StepTokens
from rooftile.errors import InvalidInput, Unsupported
from rooftile.kvcache import WindowPool
from rooftile.models import Decoder, ModelConfig
from tests.engine.asking import GREEDY, ROOM, prompts, tokens_of
from tests.models.sparse import checkpoint, likeliest, settings

# tokens per block of the cache: two compressed keys end in each, and a chosen block has two of them
SIZE = 8
SETTINGS = {
    "in chunks": ROOM | {"max_batched_tokens": 13},
    "chunks of one": ROOM | {"max_batched_tokens": 1, "max_num_seqs": 4},
    "preempted": {"max_model_len": 96, "num_blocks": 20},
    "preempted, in chunks": {"max_model_len": 96, "num_blocks": 16, "max_batched_tokens": 10},
    "three at once": ROOM | {"max_num_seqs": 3},
    "rows given back": ROOM | {"max_num_seqs": 3, "max_batched_tokens": 13},
    "rows given back, preempted": {"max_model_len": 96, "num_blocks": 24, "max_num_seqs": 6, "max_batched_tokens": 16},
    "rows given back, blocks of 32": ROOM | {"max_num_seqs": 4, "max_batched_tokens": 20, "block_size": 32},
    "contiguous": ROOM | {"allocator": "contiguous", "num_blocks": 60},
    "blocks of 32": ROOM | {"block_size": 32},
}


# so few answers that their windows take fewer rows than there are blocks
FEW = {"max_num_seqs": 3, "max_batched_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), settings())


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[list[int]]]:
    """The answers to prompts that are read one by one."""
    llm = LLM(folder, block_size=SIZE, **ROOM)
    return [tokens_of(llm, [prompt], GREEDY)[0] for prompt in prompts(9)]


@pytest.mark.parametrize(
    "sizes",
    [{}, {"compression": "linear", "length": 4}, {"compression": "mean", "stride": 8, "count": 5, "local": 2}, {"first": 0}],
    ids=str,
)
def test_tokens_are_those_of_one_pass_without_a_cache(sizes: dict, tmp_path: Path) -> None:
    decoder = Decoder.from_folder(checkpoint(tmp_path, settings("qwen3" if sizes else "llama", **sizes)))
    asked = prompts(5)
    for prompt, (answer,) in zip(asked, tokens_of(LLM(decoder, block_size=SIZE, **ROOM), asked, GREEDY), strict=True):
        assert likeliest(decoder, prompt, answer) == answer
        assert len(set(answer)) > 5


@pytest.mark.parametrize("how", SETTINGS)
def test_tokens_depend_on_no_schedule(how: str, folder: Path, alone) -> None:
    llm = LLM(folder, **{"block_size": SIZE} | SETTINGS[how])
    llm.engine._ahead = how in ("preempted", "rows given back")
    assert tokens_of(llm, prompts(9), GREEDY) == alone
    assert (llm.engine.scheduler.preemptions > 0) == ("preempted" in how)
    few = ("given back" in how) or how == "chunks of one"
    assert isinstance(llm.engine.pool, WindowPool) == few


def test_a_step_that_a_graph_could_hold_finds_the_same_tokens(folder: Path, alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it asks the host: tables have all their columns, and each token makes a compressed key, complete or not."""
    on, count = Layers.on, []

    def without_a_host(self: Layers, step: StepTokens) -> object:
        count.append(step.chunks is None)
        return on(self, step._replace(on_host=None) if step.chunks is None else step)

    monkeypatch.setattr(Layers, "on", without_a_host)
    assert tokens_of(LLM(folder, block_size=SIZE, **ROOM), prompts(9), GREEDY) == alone
    assert sum(count) > 10


@pytest.mark.parametrize("more", [{}, FEW], ids=["", "rows given back"])
def test_a_prefix_found_in_the_cache_has_its_compressed_keys(more: dict, folder: Path) -> None:
    """Those that end in a found block are not computed again; those that begin in one and end in a new block are."""
    prefix = prompts(1, seed=3)[0] * 4
    llm = LLM(folder, block_size=SIZE, **ROOM | more)
    tokens_of(llm, [prefix[:45]], GREEDY)
    longer = [[*prefix[:40], *range(n, 2 * n)] for n in (1, 4, 9, 20)]
    outputs = llm.generate(longer, GREEDY)
    # where rows are given back, another text may have got those of the prefix's window
    assert outputs[0].num_cached_tokens == 40
    assert {output.num_cached_tokens for output in outputs} <= ({0, 8, 16, 24, 32, 40} if more else {40})
    for prompt, output in zip(longer, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert likeliest(llm.engine.runner.decoder, prompt, answer) == answer


@pytest.mark.parametrize("more", [{}, FEW], ids=["", "rows given back"])
@pytest.mark.parametrize("length", [17, 20, 23, 24])
def test_forks_are_answers_of_their_own(length: int, more: dict, folder: Path) -> None:
    """Answers fork in the middle of a block, before or after a compressed key that ends in it."""
    llm = LLM(folder, block_size=SIZE, **ROOM | more)
    prompt = (prompts(3)[2] * 8)[:length]
    (found,) = tokens_of(llm, [prompt], SamplingParams(n=3, seed=11, max_tokens=20, ignore_eos=True))
    single = [SamplingParams(seed=11 + n, max_tokens=20, ignore_eos=True) for n in range(3)]
    assert found == [tokens_of(llm, [prompt], one)[0][0] for one in single]
    assert len({tuple(row) for row in found}) == 3


@pytest.mark.parametrize("more", [{}, FEW], ids=["", "rows given back"])
def test_beams_share_blocks(more: dict, folder: Path) -> None:
    """Beams with copy-on-write find what beams find that share no block."""
    beams = SamplingParams(beam_width=3, n=3, max_tokens=12)
    apart = LLM(folder, block_size=SIZE, max_model_len=96, allocator="contiguous", num_blocks=60)
    assert tokens_of(LLM(folder, block_size=SIZE, **ROOM | more), prompts(4), beams) == tokens_of(apart, prompts(4), beams)


def test_with_every_block_chosen_and_gates_on_one_branch_it_is_exact(tmp_path: Path) -> None:
    """Branches that see every key, and gates of 0, 1 and 0: the layers are those of plain attention with the branch's weights."""
    said = settings(mixers=["native_sparse"] * 3, count=8, local=7)
    sparse = Decoder.from_folder(checkpoint(tmp_path / "sparse", said))
    plain = Decoder.from_folder(checkpoint(tmp_path / "plain", settings(mixers=["attention"] * 3)))
    places = dict(plain.tensors())
    for name, x in sparse.tensors():
        if "k_proj" in name or "v_proj" in name:
            # the second branch is the selected one
            x.chunk(3)[1].copy_(places[name])
        elif name.endswith("g_proj.weight"):
            x.zero_()
        elif name.endswith("g_proj.bias"):
            x.copy_(torch.tensor([-40.0, 40.0, -40.0]).repeat(4))
        elif "compression" not in name:
            x.copy_(places[name])
    due = tokens_of(LLM(plain, block_size=SIZE, **ROOM), prompts(8), GREEDY)
    assert tokens_of(LLM(sparse, block_size=SIZE, **ROOM), prompts(8), GREEDY) == due


def test_the_cache_says_what_it_holds(folder: Path) -> None:
    pages = LLM(folder, block_size=SIZE, **ROOM).pages
    # a pair for each layer, the selected branch's where there are three
    assert pages.storage.shape == (600, 3, 2, SIZE, 2, 8)
    assert pages.planes[COMPRESSED].shape == (600, 2, 2, SIZE // 4, 2, 8)
    assert pages.window_pages.storage.shape == (600, 4, 2, SIZE, 2, 8)
    few = LLM(folder, block_size=SIZE, **ROOM | FEW).pages
    # windows of 12 tokens in three blocks each, of the answers and of a prompt that is kept, and a step of 24 tokens
    assert few.window_pages.storage.shape[0] == 4 * 3 + 3
    assert few.nbytes == pages.nbytes - 585 * few.window_pages.nbytes // 15
    assert "= 1.84 MB, and 307 kB of compressed keys and values, and windows in 15 blocks of 8 tokens, 120 in all" in str(few)


def test_memory_is_shared_out_between_blocks_and_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig.from_folder(folder)
    mixers = mixers_of(config, EngineConfig(block_size=SIZE))
    layout = CacheLayout(SIZE, tuple(spec for mixer in mixers for spec in mixer.specs()))
    block, row, load = layout.block_bytes(torch.float32), layout.row_bytes(torch.float32), PeakLoad(answers=3, tokens=24)
    assert (block, row) == (3 * 2 * SIZE * 2 * 8 * 4 + 2 * 2 * 2 * 2 * 8 * 4, 4 * 2 * SIZE * 2 * 8 * 4)
    for room in (5 * (block + row) + 1, 500 * block):
        blocks = layout.blocks_in(room, torch.float32, load)
        assert blocks is not None
        taken = blocks * block + layout.rows(blocks, load) * row
        assert room - block - row < taken <= room
    assert layout.rows(500, PeakLoad(answers=3, tokens=24, paged=False)) == 500
    # a copy of a prompt's keys and values; sums of two blocks of 16 tokens for each of 3 answers' 4 heads, and ten parts
    (sparse,) = (mixer for mixer in mixers if isinstance(mixer, native_sparse.NativeSparseMixer))
    largest = Largest(32, 3, 24, torch.float32, torch.float32, torch.device("cpu"))
    assert sparse.working_bytes(largest) == 4 * 32 * 2 * 8 * 4 + 4 * 3 * 4 * (2 * 2 + 10 * 8)
    # in place: a copy of 32 / 4 compressed keys and values, lists of 3 blocks for each of 24 tokens and 2 heads, and 4 tensors of
    # the size of queries
    monkeypatch.setattr(native_sparse, "reads_in_place", lambda *_: True)
    found = sparse.working_bytes(largest)
    assert found == 2 * 8 * 2 * 8 * 4 + 64 * 24 * 2 * 3 + 4 * 24 * 4 * 8 * 4 + 4 * 3 * 4 * (2 * 2 + 10 * 8)


def test_bf16_runs(folder: Path) -> None:
    tokens_of(LLM(folder, dtype="bfloat16", block_size=SIZE, **ROOM), prompts(4), GREEDY)


def test_what_does_not_go_with_it_is_said(folder: Path, tmp_path: Path) -> None:
    loki = LokiLayers([Loki.fit(torch.randn(50, 2, 8)) for _ in range(3)])
    for given, due in (
        ({"deterministic": True}, "deterministic is True and the model has native_sparse layers; their bits"),
        ({"kv_dtype": "fp8"}, 'kv_dtype is "fp8" and the model has native_sparse layers'),
        ({"approximate": loki}, "approximate is given and the model has native_sparse layers, which choose keys by themselves"),
    ):
        with pytest.raises(Unsupported, match=due):
            LLM(folder, **given, **ROOM)
    wide = checkpoint(tmp_path, settings(length=32, stride=32, block_size=32))
    with pytest.raises(InvalidInput, match="block_size is 16 and the model has native_sparse layers with a stride of 32"):
        LLM(wide, **ROOM)
    with pytest.raises(Unsupported, match="the model has native_sparse layers, which choose keys by themselves"):
        calibrate(Decoder.from_folder(folder), [1] * 100)


def test_samples_in_turn_are_those_of_samples_together(folder: Path) -> None:
    """The prompt that is kept for them keeps the rows of its window, and its compressed keys."""
    asked = [(prompts(3)[2] * 8)[:length] for length in (8, 24, 45)]
    params = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True)
    due = tokens_of(LLM(folder, block_size=SIZE, **ROOM), asked, params)
    for more in ({"max_batched_tokens": 24}, {"max_batched_tokens": 5, "enable_prefix_caching": False}):
        llm = LLM(folder, block_size=SIZE, **ROOM | {"max_num_seqs": 2} | more)
        assert isinstance(llm.engine.pool, WindowPool)
        assert tokens_of(llm, asked, params) == due
