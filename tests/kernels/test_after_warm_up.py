"""After an engine has started, no request compiles a kernel; `tests/gpu/test_compilations.py` counts Triton's own."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rooftile.engine import SamplingParams
from rooftile.models import ExpertSizes, ModelConfig
from rooftile.models.config import config_of
from rooftile.moe import Router
from rooftile_lab.bench.adapter_rates import write_adapter
from tests.engine.every_request import requests
from tests.grids import swept
from tests.kernels.recorded import Recorded
from tests.kernels.recorded_engine import recorded_engine
from tests.models import experts
from tests.models.checkpoints import CONFIGS

pytest.importorskip("triton", reason="Triton is not installed on this platform")

SETTINGS = {"max_num_seqs": 17, "max_model_len": 2048, "num_blocks": 600, "max_batched_tokens": 900}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096}
WIDE_GPT2 = {"n_embd": 256, "n_positions": 4096}


def config_named(name: str):
    """A small model with heads of 64 numbers, which every kernel takes."""
    said = (CONFIGS | experts.CONFIGS)[name]().to_dict() | (WIDE_GPT2 if name == "gpt2" else WIDE)
    return replace(config_of(said | {"head_dim": 64}, "here"), eos_ids=())


def named(one: Recorded) -> str:
    return f"{one.name} {one.constants} {one.attributes}"


# each family, and each kind of cache
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    swept(product(["llama", "gemma2", "qwen3", "gpt2", "gpt_oss"], ["auto", "fp8"]), lambda case: case),
    ids=str,
)
def test_no_request_compiles_a_kernel(name: str, kv_dtype: str) -> None:
    _check(config_named(name), kv_dtype=kv_dtype)


# an odd vocabulary: the rows of its logits are aligned to 16 bytes by chance only
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_no_request_compiles_a_kernel_of_a_deterministic_engine(name: str) -> None:
    _check(replace(config_named(name), vocab_size=997), deterministic=True)


def _check(config: ModelConfig, **settings: Any) -> None:
    with recorded_engine(config, **settings, **SETTINGS) as (llm, compiled):
        # without it this test could not fail
        assert compiled
        after: dict[str, list[str]] = {}
        for what, ask in requests(llm):
            before = set(compiled)
            ask()
            after[what] = [named(one) for key, one in compiled.items() if key not in before]
    found = [f"{what}: {kernel}" for what, kernels in after.items() for kernel in kernels]
    assert not found, "\n".join(found)


def test_no_request_compiles_a_kernel_of_adapters(tmp_path: Path) -> None:
    """Ranks and numbers of rows of all kinds, and projections of one part and of several."""
    with recorded_engine(config_named("llama"), **SETTINGS, max_adapters=3, max_adapter_rank=80) as (llm, compiled):
        before = set(compiled)
        for rank in (5, 16, 80):
            write_adapter(llm.engine.runner.decoder, tmp_path / f"{rank}", rank)
            llm.load_adapter(f"{rank}", tmp_path / f"{rank}")
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        for lengths in ((1,), (7, 20, 600), (900, 17), (5,) * 17):
            for names in (["16"], ["5", "80", None]):
                llm.generate([[3] * n for n in lengths], params, adapter=[names[n % len(names)] for n in range(len(lengths))])
        assert {one.name for one in compiled.values()} >= {"_shrink", "_expand"}
        assert not (found := [named(one) for key, one in compiled.items() if key not in before]), "\n".join(found)


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "fixed-order"])
def test_no_request_compiles_a_kernel_of_experts(deterministic: bool) -> None:
    """Tiles of experts grow with a step's tokens: every size of them is compiled before."""
    sizes = ExpertSizes(experts=4, hidden=96, shared=32, router=Router(active=1))
    config = replace(config_named("llama"), feed_forwards=("dense", "experts", "experts"), experts=sizes)
    with recorded_engine(config, deterministic=deterministic, **SETTINGS) as (llm, compiled):
        before = set(compiled)
        for _, ask in requests(llm):
            ask()
        launched = {key: one for key, one in compiled.items() if one.fn.fn.__module__.startswith("rooftile.moe.")}
        found = [named(one) for key, one in launched.items() if key not in before]
    assert launched
    assert not found, "\n".join(found)
