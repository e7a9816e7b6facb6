"""Loki and Native Sparse Attention in the engine on a GPU: the tokens that it finds on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rooftile.approximate.loki import decoding as paged
from rooftile.engine import LLM
from rooftile.engine.mixers.loki.calibration import calibrate
from rooftile.kvcache import WindowPool
from rooftile.models import Decoder
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts
from tests.gpu.test_engine import engines
from tests.interpreter.test_loki_pages import SHAPES, cache_of
from tests.models.checkpoints import VOCABULARY
from tests.models.sparse import checkpoint, settings

pytestmark = pytest.mark.gpu

HOW = [{}, {"num_blocks": 24}, {"enforce_eager": True}, {"max_batched_tokens": 13}]


def assert_alike(here: LLM, there: LLM) -> None:
    asked = prompts(40)
    due, found = here.generate(asked, GREEDY), there.generate(asked, GREEDY)
    assert [output.error for output in found] == [None] * 40
    same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(due, found, strict=True)]
    # a sum in another order may turn the order of two tokens, or of two pages, that are nearly alike
    assert sum(same) >= 37
    assert_clean(there)


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", ["llama, llama3", "qwen3", "gemma2"])
def test_loki_finds_the_cpus_tokens(name: str, how: dict) -> None:
    decoders = [llm.engine.runner.decoder for llm in engines(name)]
    text = torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(5)).tolist()
    loki = calibrate(decoders[0], text, dims=0.3, keep=0.3, length=100)
    here, there = (LLM(one, block_size=8, approximate=loki, **ROOM | more) for one, more in zip(decoders, ({}, how), strict=True))
    assert (there.engine.runner._graphs is None) == ("enforce_eager" in how)
    assert_alike(here, there)


@pytest.mark.parametrize("how", [*HOW, {"max_num_seqs": 4, "max_batched_tokens": 24}], ids=str)
def test_native_sparse_attention_finds_the_cpus_tokens(how: dict, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, settings())
    here = LLM(Decoder.from_folder(folder, device="cpu"), block_size=8, **ROOM)
    there = LLM(folder, device="cuda", block_size=8, **ROOM | how)
    assert (there.engine.runner._graphs is None) == ("enforce_eager" in how)
    assert isinstance(there.engine.pool, WindowPool) == ("max_num_seqs" in how)
    assert_alike(here, there)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "Hk", "G", "D", "r"), SHAPES)
def test_pages_have_the_scores_of_the_definition(size: int, Hk: int, G: int, D: int, r: int, dtype: torch.dtype) -> None:
    pages, table, lengths = cache_of(size, Hk, D, r)
    leading = pages.planes["leading"][:, 1].to("cuda", dtype)
    q, table, lengths = torch.randn(4, Hk * G, D).to("cuda", dtype), table.cuda(), lengths.cuda()
    found = paged.page_scores(q, leading, table, lengths, scale=0.7, softcap=None)
    due = paged.scores_as_defined(q.cpu(), leading.cpu(), table.cpu(), lengths.cpu(), 0.7, None)
    torch.testing.assert_close(found.cpu(), due, atol=1e-4, rtol=1e-4)
