"""An engine that deals out the tokens of each sequence to several ranks gives the tokens of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rooftile.engine import LLM, EngineConfig
from rooftile.engine.ranks import opening
from rooftile.engine.settings.table import ranks_of
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder
from tests.engine.asking import assert_clean, prompts
from tests.engine.test_ranks import ASKED, assert_same
from tests.models import latent, recurrent
from tests.models.checkpoints import CONFIGS, SMALL, saved

# chunks, more requests than run at once, and so few blocks that some are preempted
CROWDED: dict[str, Any] = {
    "dtype": "fp32", "block_size": 8, "max_model_len": 96, "num_blocks": 11, "max_batched_tokens": 13, "max_num_seqs": 6,
    "seed": 3,
}  # fmt: skip
# a window that two ranks' blocks of 8 divide, and capped scores
WINDOWS = {
    "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}  # fmt: skip


def folder_of(config: Any, folder: Path) -> Path:
    torch.manual_seed(3)
    return Path(saved(transformers.AutoModelForCausalLM.from_config(config).eval(), folder))


def test_two_ranks_with_windows(tmp_path: Path) -> None:
    """Mixed requests, twice, so that the second time prefixes are found; blocks are shared, copied and given up."""
    folder = folder_of(transformers.Gemma2Config(**SMALL, **WINDOWS), tmp_path)
    two, one = LLM(folder, context_parallel_size=2, **CROWDED), LLM(folder, **CROWDED | {"block_size": 16})
    # half of each block's bytes
    assert two.pages.nbytes == one.pages.nbytes // 2
    assert (two.engine.pool.total, two.engine.pool.size) == (11, 16)
    # parts are not rounded before they are merged
    assert two.engine.runner.layers.mixers[0].shared.settings.partial  # type: ignore[attr-defined]
    asked = prompts(16)
    for _ in range(2):
        assert_same(two.generate(asked, ASKED * 2), one.generate(asked, ASKED * 2))
    assert two.engine.scheduler.preemptions == one.engine.scheduler.preemptions > 0
    assert_clean(two)
    two.close()


def test_four_ranks_with_an_fp8_cache(tmp_path: Path) -> None:
    """Two of them attend to no chunk's own keys, since there are two key heads."""
    folder, settings = folder_of(CONFIGS["llama"](), tmp_path), CROWDED | {"kv_dtype": "fp8", "num_blocks": 9}
    four, one = LLM(folder, context_parallel_size=4, **settings), LLM(folder, **settings | {"block_size": 32})
    asked = prompts(8, seed=1)
    assert_same(four.generate(asked, ASKED), one.generate(asked, ASKED))
    assert_clean(four)
    four.close()


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a rank is started or a weight is read."""
    monkeypatch.setattr(opening, "WorkerProcesses", None)
    monkeypatch.setattr(Decoder, "from_folder", None)
    for wrong, sentence in ((3, "is 3; must be a power of two"), (0, "is 0; must be"), (128, "is 128; may be at most 64")):
        with pytest.raises(InvalidInput, match=f"context_parallel_size {sentence}"):
            EngineConfig(context_parallel_size=wrong)
    with pytest.raises(Unsupported, match="context_parallel_size is 2 and tensor_parallel_size is 4; an engine has one of them"):
        EngineConfig(context_parallel_size=2, tensor_parallel_size=4)
    with pytest.raises(Unsupported, match="context_parallel_size is 2 and deterministic is given"):
        EngineConfig(context_parallel_size=2, deterministic=True)
    configs: dict[str, Any] = recurrent.CONFIGS | latent.CONFIGS | CONFIGS
    for name, what in (("mamba2", "kind 'mamba2'"), ("deepseek_v3", "kind 'latent'"), ("mistral", "a window of 7 tokens")):
        (tmp_path / name).mkdir()
        configs[name]().save_pretrained(tmp_path / name)
        with pytest.raises(Unsupported, match=f"context_parallel_size is 2.*{what}"):
            LLM(tmp_path / name, context_parallel_size=2)
    (tmp_path / "llama").mkdir()
    CONFIGS["llama"]().save_pretrained(tmp_path / "llama")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidInput, match="context_parallel_size is 2, and torchrun has started 4 ranks; make them equal"):
        LLM(tmp_path / "llama", context_parallel_size=2)


def test_each_rank_has_a_gpu() -> None:
    assert ranks_of({"context_parallel_size": 4}) == ranks_of({"tensor_parallel_size": 4}) == 4
    assert EngineConfig(context_parallel_size=4).ranks == 4
