"""Starts a serving engine and times it, here and in a second process, which finds Triton's cache filled.

python -m rooftile_lab.bench.engine_start MODEL SCALE DEVICE WEIGHTS     prints the answer of `again` as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from rooftile.diagnosis.programs import decode_step
from rooftile.engine.llm import LLM
from rooftile.models import Decoder
from rooftile_lab.bench.driver import fitted
from rooftile_lab.bench.models import decoder_named
from rooftile_lab.bench.processes import environment
from rooftile_lab.bench.serving import settings_of
from rooftile_lab.bench.workloads import Workload, named


def workloads_for(scale: float, decoder: Decoder) -> dict[str, Workload]:
    """W1, W10 and W11 with ids that the model has."""
    chosen = named(["W1", "W10", "W11"], factor=scale)
    return {one.name: replace(one, requests=fitted(one, decoder.config.vocab_size)) for one in chosen}


def started(workloads: dict[str, Workload], decoder: Decoder) -> tuple[LLM, dict[str, Any]]:
    """An engine for these workloads, and how long it took to start."""
    settings = max((settings_of(one, decoder.config) for one in workloads.values()), key=lambda one: one["max_model_len"])
    before, began = compiled(), perf_counter()
    llm = LLM(decoder, **settings)
    return llm, {"seconds": round(perf_counter() - began, 2), "compiled": compiled() - before, "settings": settings}


def compiled() -> int:
    """Kernels in Triton's cache on disk."""
    if find_spec("triton") is None:
        return 0
    from triton import knobs  # type: ignore[import-untyped]

    return sum(1 for _ in Path(knobs.cache.dir).rglob("*.cubin"))


def in_second_process(model: str, scale: float, device: torch.device, weights: str) -> dict[str, Any]:
    """The answer of `again` in a process of its own; {"reason": why} if it failed."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, model, str(scale), str(device), weights],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr, file=sys.stderr)  # noqa: T201
        return {"reason": f"failed with {done.returncode}: {done.stderr.strip().rpartition(chr(10))[-1]}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def again(model: str, scale: float, device: torch.device, weights: str) -> dict[str, Any]:
    """How long an engine takes in a process that comes second, and on a GPU how long it is idle in decode steps."""
    decoder = decoder_named(model, device, weights)
    llm, start = started(workloads_for(scale, decoder), decoder)
    sizes = decode_step.DecodeSizes.of(scale)
    if device.type != "cuda":
        return {"start": start, "idle": {}}
    # another process, another temperature: the profiled steps are compared with steps just before them
    step_ms, _ = decode_step.milliseconds(llm.engine, sizes)
    return {"start": start, "idle": {"unprofiled_ms": round(step_ms, 4)} | decode_step.idle(llm.engine, sizes)}


if __name__ == "__main__":
    print(json.dumps(again(sys.argv[1], float(sys.argv[2]), torch.device(sys.argv[3]), sys.argv[4])))  # noqa: T201
