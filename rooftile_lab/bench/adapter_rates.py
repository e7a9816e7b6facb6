"""Output tokens per second of requests that several adapters share out, beside the same requests without adapters."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from rooftile.engine.adapters.targets import Targets
from rooftile.engine.llm import LLM
from rooftile.models import Decoder
from rooftile_lab.bench.workloads import Workload
from rooftile_lab.bench.works import tidy

REQUESTS, ADAPTERS, RANK = 64, 16, 16


class AdapterRate(NamedTuple):
    """One way to answer the requests.

    Args:
        way: its name.
        seconds: of each run that counts.
        tokens: of all answers of a run.
    """

    way: str
    seconds: list[float]
    tokens: int


def rates(decoder: Decoder, workload: Workload, settings: dict[str, object], runs: int) -> Iterator[AdapterRate]:
    """Yields the rates of the base alone, of the base in an engine with adapters, and of requests dealt out to the adapters."""
    plain = LLM(decoder, **settings)  # type: ignore[arg-type]
    yield _rate("base", plain, workload, [None], runs)
    device = decoder.embedding.device
    del plain
    tidy(device)
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(decoder, Path(folder), RANK)
        names = [f"adapter {n}" for n in range(ADAPTERS)]
        llm = LLM(decoder, **settings, adapters=dict.fromkeys(names, folder))  # type: ignore[arg-type]
    yield _rate("base, beside adapters", llm, workload, [None], runs)
    yield _rate(f"{ADAPTERS} adapters", llm, workload, names, runs)
    del llm
    tidy(device)


def write_adapter(decoder: Decoder, folder: Path, rank: int) -> None:
    """Writes an adapter with small random numbers for all projections of a decoder."""
    found = {}
    for name, target in Targets(decoder).modules.items():
        found[f"base_model.model.model.{name}.lora_A.weight"] = torch.randn(rank, target.inputs, dtype=torch.bfloat16) * 0.01
        found[f"base_model.model.model.{name}.lora_B.weight"] = torch.randn(target.rows, rank, dtype=torch.bfloat16) * 0.01
    folder.mkdir(exist_ok=True)
    save_file(found, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def _rate(way: str, llm: LLM, workload: Workload, names: Sequence[str | None], runs: int) -> AdapterRate:
    prompts = [ask.prompt for ask in workload.requests]
    params = [ask.params for ask in workload.requests]
    adapters = [names[n % len(names)] for n in range(len(prompts))]
    seconds, tokens = [], 0
    for n in range(runs + 1):
        began = perf_counter()
        outputs = llm.generate(prompts, params, adapter=adapters, use_tqdm=False)
        tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        # the first run warms up
        seconds += [perf_counter() - began] * (n > 0)
        llm.engine.pool.forget_prefixes()
    return AdapterRate(way, seconds, tokens)
