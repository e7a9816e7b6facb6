"""Triton compiles nothing once an engine has started, whatever is asked of it; `test_after_warm_up` needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rooftile.engine.llm import LLM
from rooftile.models import Decoder
from tests.engine.every_request import requests
from tests.kernels.test_after_warm_up import config_named

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")
pytestmark = pytest.mark.gpu

SETTINGS = {"max_num_seqs": 40, "max_model_len": 2048, "num_blocks": 1200, "max_batched_tokens": 900}


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the name and the constants of each kernel that Triton compiles, or loads from its cache on disk."""
    found: list[str] = []
    before = triton.knobs.compilation.listener

    def listen(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        found.append(f"{src.name} {src.constants} {src.attrs}")

    triton.knobs.compilation.listener = listen
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}), ("llama", {"kv_dtype": "fp8", "weights": "fp8"}), ("llama", {"weights": "int4:32", "enforce_eager": True}),
        ("gemma2", {}), ("gpt2", {"kv_dtype": "fp8"}), ("qwen3", {"deterministic": True}),
    ],
    ids=str,
)  # fmt: skip
def test_no_request_compiles_a_kernel(name: str, settings: dict[str, Any]) -> None:
    decoder = Decoder.random(config_named(name), torch.bfloat16, "cuda")
    with compilations() as started:
        llm = LLM(decoder, **SETTINGS | settings)
    # without it this test could not fail
    assert started
    found: list[str] = []
    for what, ask in requests(llm):
        with compilations() as compiled:
            ask()
        found += [f"{what}: {one}" for one in compiled]
    assert not found, "\n".join(found)
