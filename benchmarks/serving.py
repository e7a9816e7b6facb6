"""Serving on one GPU, line by line as peers were measured, with Transformers' continuous batching beside it in the same run.

    PYTHONPATH=. python benchmarks/serving.py --model 1b --json benchmarks/results/h200-serving-peers.jsonl

Random weights, on a GPU in bf16, of which the peer has views. A JSON line a row, printed and appended as soon as it is there:

    start                 seconds from the weights to an engine that is ready, and how many kernels Triton compiled for it
    W1, batch 1, n = 4    output tokens a second of the workloads W1, W10 and W11: a whole run first, then RUNS that count
    decode step           milliseconds from step to step when all requests decode, each step begun before the last has ended
    W1, first N           the same requests that the peer gets
    start, again          in a process of its own, which finds Triton's cache filled
    idle                  how long no kernel, copy or fill ran in such steps: under the profiler, in that second process, so
                          that no other row is profiled; and beside the milliseconds of steps there that nobody watched
    W1, first N           Transformers; "times" is our rate over its rate
    W8, first N           a cache of 15.7k slots, whole reservations and then pages; "times" is the second rate over the first

What only a GPU has is null on a CPU: `--model tiny --device cpu --scale 0.03` tries the script.
"""

# ruff: noqa: T201 - what it prints is what it is for
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks import decode_step
from rooftile.bench import results
from rooftile.bench.driver import fitted
from rooftile.bench.models import MODELS, decoder_named
from rooftile.bench.serving import Costs, Measures, costs_of, repeat, settings_of, tidy
from rooftile.bench.session import Session, open_session
from rooftile.bench.workloads import Scale, Workload, named
from rooftile.hardware.device import device_of
from rooftile.models import Decoder
from rooftile.serve.llm import LLM

RUNS = 2
ROOT = Path(__file__).resolve().parents[1]


class Asked(NamedTuple):
    """What is measured."""

    model: str
    scale: float = 1.0
    peer: bool = True
    peer_requests: int = 64
    peer_limit_s: float = 90.0
    w8_requests: int = 200


def measure(asked: Asked, session: Session) -> Iterator[dict[str, Any]]:
    """All rows, each as soon as it is there."""
    about = session.about("bf16" if session.device.type == "cuda" else "fp32")
    for row in _rows(asked, session):
        yield {"model": asked.model, "scale": asked.scale, **row, **about}


def workloads_for(asked: Asked, decoder: Decoder) -> dict[str, Workload]:
    """W1, W10 and W11 with ids that the model has."""
    chosen = named(["W1", "W10", "W11"], factor=asked.scale)
    return {one.name: replace(one, requests=fitted(one, decoder.config.vocab_size)) for one in chosen}


def started(asked: Asked, decoder: Decoder) -> tuple[LLM, dict[str, Any]]:
    """An engine, and how long that took."""
    settings = max(
        (settings_of(one, decoder) for one in workloads_for(asked, decoder).values()), key=lambda one: one["max_model_len"]
    )
    before, began = compiled(), perf_counter()
    llm = LLM(decoder, **settings)
    return llm, {"seconds": round(perf_counter() - began, 2), "compiled": compiled() - before, "settings": settings}


def compiled() -> int:
    """Kernels in Triton's cache on disk."""
    if find_spec("triton") is None:
        return 0
    from triton import knobs

    return sum(1 for _ in Path(knobs.cache.dir).rglob("*.cubin"))


def again(asked: Asked, device: torch.device) -> dict[str, Any]:
    """What a process finds that comes second: how long its engine takes, and on a GPU what its steps leave idle."""
    decoder = decoder_named(asked.model, device)
    llm, start = started(asked, decoder)
    sizes = decode_step.Sizes.of(Scale(asked.scale))
    if device.type != "cuda":
        return {"start": start, "idle": None}
    # another process, another temperature: what the profiler sees is compared with steps just before
    step_ms, _ = decode_step.milliseconds(llm.engine, sizes)
    return {"start": start, "idle": {"unprofiled_ms": round(step_ms, 4)} | decode_step.idle(llm.engine, sizes)}


def _rows(asked: Asked, session: Session) -> Iterator[dict[str, Any]]:
    device = session.device
    began = perf_counter()
    decoder = decoder_named(asked.model, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    loaded = perf_counter() - began
    llm, start = started(asked, decoder)
    ours = {"engine": "rooftile"}
    yield {"row": "start", **ours, **start, "weights_s": round(loaded, 2)}
    workloads, costs = workloads_for(asked, decoder), costs_of(llm, session)
    w1, w10, w11 = workloads.values()
    several = f"n = 4, {len(w11.requests)} prompts, {w11.requests[0].params.max_tokens} tokens"
    for name, workload in (("W1", w1), ("batch 1", w10), (several, w11)):
        yield {"row": name, **ours, **_rate(llm, workload, costs)}
    sizes = decode_step.Sizes.of(Scale(asked.scale))
    step = _step(llm, sizes, costs)
    yield {"row": f"decode step, {sizes}", **ours, **step}
    share = replace(w1, requests=w1.requests[: asked.peer_requests])
    shared = {"row": f"W1, first {len(share.requests)}", **ours, **_rate(llm, share, costs)}
    yield shared
    # the second process, and the peer, need the memory
    del llm
    tidy(device)
    second = _in_second_process(asked, device)
    yield {"row": "start, again", **ours, **second["start"]}
    yield {"row": f"idle, {sizes}", **ours, **_idle(second["idle"])}
    if asked.w8_requests:
        yield from _allocators(asked, decoder, costs)
    if asked.peer:
        yield from _peers(asked, decoder, share, shared["output_tok_s"])


def _allocators(asked: Asked, decoder: Decoder, costs: Costs | None) -> Iterator[dict[str, Any]]:
    """The paper's comparison in time: the same kernels and scheduler, with room for the longest reserved or not."""
    (w8,) = named(["W8"], factor=asked.scale)
    w8 = replace(w8, requests=fitted(w8, decoder.config.vocab_size)[: asked.w8_requests])
    reserved = None
    for allocator in ("contiguous", "paged"):
        llm = LLM(decoder, **settings_of(w8, decoder) | {"allocator": allocator})
        _, (found,) = repeat(llm, w8, 1, costs=costs)
        yield {
            "row": f"W8, first {len(w8.requests)}", "engine": f"rooftile, {allocator}", "running": round(found.running, 1),
            "output_tok_s": round(found.output_tok_s, 1), "output_tokens": found.output_tokens, "steps": found.steps,
            "waste_percent": round(found.waste_percent, 1), "preemptions": found.preemptions,
            "times": round(found.output_tok_s / reserved, 2) if reserved else None,
        }  # fmt: skip
        reserved = found.output_tok_s
        del llm
        tidy(decoder.embedding.device)


def _rate(llm: LLM, workload: Workload, costs: Costs | None) -> dict[str, Any]:
    """Output tokens a second."""
    first, found = repeat(llm, workload, RUNS, costs=costs)
    each = [round(one.output_tok_s, 1) for one in found]
    return {
        "workload": workload.name, "output_tok_s": round(median(each), 1), "each": each, "output_tokens": found[0].output_tokens,
        "requests": found[0].requests, "as_asked": all(_as_asked(one, workload) for one in found),
        "seconds": round(median(one.seconds for one in found), 3), "first_s": None if first is None else round(first, 2),
        "host_us_step": round(median(one.host_us_step for one in found)),
        "floor_percent": None if costs is None else round(median(one.floor_percent or 0.0 for one in found), 1),
    }  # fmt: skip


def _as_asked(found: Measures, workload: Workload) -> bool:
    """Whether all requests were answered, and their answers have the tokens that were asked for."""
    due = sum((ask.params.max_tokens or 0) * ask.params.n for ask in workload.requests)
    return found.requests == len(workload.requests) and found.output_tokens == due


def _step(llm: LLM, sizes: decode_step.Sizes, costs: Costs | None) -> dict[str, Any]:
    found = [decode_step.milliseconds(llm.engine, sizes) for _ in range(RUNS)]
    each = [round(ms, 4) for ms, _ in found]
    more: dict[str, Any] = {"steps": sizes.steps, "floor_ms": None}
    if costs is not None:
        more["floor_ms"] = round((costs.weight_bytes + sizes.batch * sizes.context * costs.token_bytes) / costs.bytes_s * 1e3, 4)
    return {"ms": round(median(each), 4), "each": each, "contexts": [round(context, 1) for _, context in found], **more}


def _idle(found: dict[str, Any] | None) -> dict[str, Any]:
    """Of a step's time the share in which the GPU did nothing: as profiled, and of the steps before that were not."""
    about = {"measured": "in a second process"}
    if found is None or "busy_ms" not in found:
        return {"busy_ms": None, "idle_percent": None, "idle_percent_unprofiled": None, **about, **(found or {})}
    return {**found, "idle_percent_unprofiled": round(100 * (1 - found["busy_ms"] / found["unprofiled_ms"]), 1), **about}


def _in_second_process(asked: Asked, device: torch.device) -> dict[str, Any]:
    """`again`, there; or why there is no answer."""
    words = ["--model", asked.model, "--scale", str(asked.scale), "--device", str(device), "--again"]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, __file__, *words], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        reason = {"reason": f"failed with {done.returncode}: {done.stderr.strip().rpartition(chr(10))[-1]}"}
        return {"start": reason, "idle": reason}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _peers(asked: Asked, decoder: Decoder, share: Workload, our_rate: float) -> Iterator[dict[str, Any]]:
    """A row each; one that fails has a reason and no rate, and the others go on."""
    from benchmarks.transformers_batching import PEERS, answers

    for attention in PEERS:
        engine = f"transformers, {attention}"
        head = {"row": f"W1, first {len(share.requests)}", "engine": engine, "transformers": version("transformers")}
        try:
            found = answers(decoder, share.requests, attention, asked.peer_limit_s)
        except Exception as error:
            traceback.print_exc()
            found = {"reason": f"failed: {type(error).__name__}: {error}"}
        rate = found.get("output_tok_s")
        yield {**head, **found, "times": round(our_rate / rate, 2) if rate else None}
        tidy(decoder.embedding.device)


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=[name for name, config in MODELS.items() if config.family == "llama"], default="1b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of the requests and their lengths")
    parser.add_argument("--json", help="append the rows to this file")
    parser.add_argument("--commit", default="", help="the commit that is measured, where git cannot say")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="Transformers besides")
    parser.add_argument("--peer-requests", type=int, default=64, help="W1's first so many are for the peer")
    parser.add_argument("--peer-limit", type=float, default=90.0, help="seconds after which a peer is stopped")
    parser.add_argument("--w8-requests", type=int, default=200, help="W8's first so many, with both allocators; 0 for none")
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = device_of(given.device)
    asked = Asked(given.model, given.scale, given.peer, given.peer_requests, given.peer_limit, given.w8_requests)
    if given.again:
        print(json.dumps(again(asked, device)))
        return
    reasons = []
    for row in measure(asked, open_session(device, commit=given.commit)):
        print(json.dumps(row), flush=True)
        if given.json:
            results.append(given.json, [json.dumps(row)])
        reasons += [reason for reason in [row.get("reason")] if reason]
    if reasons:
        sys.exit("; ".join(reasons))


if __name__ == "__main__":
    main()
