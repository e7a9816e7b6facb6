"""Measures an engine on workloads: what `rooftile bench serving` prints. What each number means is said in `Measures`."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch

from rooftile.bench.driver import Clock, Course, Trace, WallClock, drive, fitted
from rooftile.bench.models import decoder_named
from rooftile.bench.run import Progress
from rooftile.bench.session import About, Session
from rooftile.bench.workloads import Workload
from rooftile.errors import InvalidInput
from rooftile.models import Decoder
from rooftile.serve.llm import LLM

# what a request must keep to count in the goodput: seconds to the first token, and from token to token
FIRST_TOKEN = 1.0
EACH_TOKEN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One run. Rates and times are those of requests that were answered; None where no request has such a time.

    Percentiles interpolate between neighbours. Averages over time weigh the time that passes in steps.
    """

    seconds: float
    requests: int  # answered
    refused: int
    gone: int  # the client went away
    prompt_tokens: int
    output_tokens: int  # of all answers to a prompt
    output_tok_s: float
    total_tok_s: float  # of prompts, cached or not, and answers
    requests_s: float
    goodput_s: float  # requests a second with TTFT and TPOT within FIRST_TOKEN and EACH_TOKEN
    ttft_ms_p50: float | None  # from arrival to the first token
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None  # from token to token, all of them
    itl_ms_p90: float | None
    itl_ms_p99: float | None
    tpot_ms_p50: float | None  # the mean of that in a request
    tpot_ms_p90: float | None
    tpot_ms_p99: float | None
    e2e_ms_p50: float | None  # from arrival to the last token
    e2e_ms_p90: float | None
    e2e_ms_p99: float | None
    normalised_ms: float | None  # e2e over the length of the (longest) answer, mean over requests
    waste_percent: float  # slots of the cache's used blocks that hold no token, average over time; shared ones count once
    saved_percent: float  # blocks saved by sharing over blocks without sharing, average over time
    running: float  # answers, average over time
    preemptions: int
    steps: int
    requests_per_step: float
    host_us_step: float  # of a step: less waiting for the GPU; on a CPU less the model's computation
    floor_percent: float | None  # of the time that the machine's ceilings ask for at least
    peak_bytes: int  # the most that torch had handed out on a GPU, model and cache included; on a CPU the process's most


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a model asks of a machine's ceilings."""

    weight_bytes: int  # read in every step
    token_bytes: int  # keys and values of a token
    token_flops: int  # of a token read, but for attention
    bytes_s: float
    flops_s: float

    def floor(self, course: Course) -> float:
        """Seconds: every step reads the weights, every token of an answer the cache before it, and prompts are multiplied.

        Of a prompt's attention nothing is counted.
        """
        generated = sum(sum(trace.lengths) for trace in course.traces)
        cached = sum(_context(trace.prompt, length) for trace in course.traces for length in trace.lengths)
        moved = course.steps * self.weight_bytes + cached * self.token_bytes
        return moved / self.bytes_s + max(course.read - generated, 0) * self.token_flops / self.flops_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(About):
    """A workload on a model: the median of the runs, number by number, the least and the most."""

    workload: str
    purpose: str
    model: str
    allocator: str
    settings: dict[str, Any]  # of LLM
    scale: float
    runs: int
    first_s: float | None  # the run before the first, in which kernels were compiled, on a GPU
    start_s: float  # making or loading the weights, the cache, kernels and graphs; not importing
    median: Measures
    low: Measures
    high: Measures
    over_contiguous: dict[str, float] | None = None  # ratios to the same workload on reserved memory

    def json(self) -> str:
        """The row as one line."""
        return json.dumps(asdict(self))


def measures(course: Course, *, costs: Costs | None = None, peak_bytes: int = 0) -> Measures:
    """The numbers of a run."""
    answered = [trace for trace in course.traces if trace.fate == "answered"]
    output = sum(sum(trace.lengths) for trace in answered)
    prompts = sum(trace.prompt for trace in answered)
    first = [trace.times[0] - trace.arrived for trace in answered]
    e2e = [trace.ended - trace.arrived for trace in answered]
    gaps = [after - before for trace in answered for before, after in pairwise(trace.times)]
    each = [pace for trace in answered if (pace := _pace(trace)) is not None]
    good = sum(
        trace.times[0] - trace.arrived <= FIRST_TOKEN and (_pace(trace) or 0.0) <= EACH_TOKEN for trace in answered
    )
    normalised = [length / max(trace.lengths) for length, trace in zip(e2e, answered, strict=True)]
    seconds = max(course.seconds, 1e-9)
    times = {
        f"{name}_ms_p{rank}": None if not values else float(np.percentile(values, rank)) * 1e3
        for name, values in (("ttft", first), ("itl", gaps), ("tpot", each), ("e2e", e2e))
        for rank in (50, 90, 99)
    }
    weight = sum(sample.weight for sample in course.samples) or 1.0
    return Measures(
        seconds=course.seconds,
        requests=len(answered),
        refused=sum(trace.fate == "refused" for trace in course.traces),
        gone=sum(trace.fate == "gone" for trace in course.traces),
        prompt_tokens=prompts,
        output_tokens=output,
        output_tok_s=output / seconds,
        total_tok_s=(prompts + output) / seconds,
        requests_s=len(answered) / seconds,
        goodput_s=good / seconds,
        **times,
        normalised_ms=float(np.mean(normalised)) * 1e3 if normalised else None,
        waste_percent=100 * sum(sample.waste * sample.weight for sample in course.samples) / weight,
        saved_percent=100 * sum(sample.saved * sample.weight for sample in course.samples) / weight,
        running=sum(sample.running * sample.weight for sample in course.samples) / weight,
        preemptions=course.preemptions,
        steps=course.steps,
        requests_per_step=len(answered) / max(course.steps, 1),
        host_us_step=1e6 * course.host_seconds / max(course.steps, 1),
        floor_percent=None if costs is None else 100 * costs.floor(course) / seconds,
        peak_bytes=peak_bytes,
    )


def measure(
    workloads: Sequence[Workload], session: Session, *, model: str = "1b", allocator: str | None = None, scale: float = 1.0,
    runs: int = 3, settings: dict[str, Any] | None = None, clock: Clock | None = None, say: Progress | None = None,
) -> Iterator[Row]:  # fmt: skip
    """A row for each workload and allocator, as soon as it is there.

    Args:
        workloads: as `workloads.named` makes them.
        session: the machine.
        model: one of `models.MODELS`, or a checkpoint's folder.
        allocator: for all; None for what each workload asks for.
        scale: of the workloads, to be written into the rows.
        runs: of each; every run begins with an empty prefix cache.
        settings: of LLM, over the workloads' own.
        clock: the machine's, if None.
        say: is told what is being done.
    """
    if runs < 1:
        raise InvalidInput(f"runs is {runs}; must be at least 1")
    say = say or (lambda words: None)
    clock = clock or WallClock()
    say("the model")
    began = clock.now()
    decoder = decoder_named(model, session.device)
    loaded = clock.now() - began
    llm: LLM | None = None
    started, known = 0.0, None
    for workload in workloads:
        workload = replace(workload, requests=fitted(workload, decoder.config.vocab_size))
        rows: dict[str, Row] = {}
        # what is compared comes first: the ratio is in the row of what it is compared with
        for one in reversed(workload.allocators) if allocator is None else (allocator,):
            asked = settings_of(workload, decoder) | (settings or {}) | {"allocator": one}
            if llm is None or asked != known:
                say(f"{workload.name}: starting")
                llm = None
                tidy(session.device)
                began = clock.now()
                llm, known = LLM(decoder, **asked), asked
                started = loaded + clock.now() - began
            first, found = repeat(llm, workload, runs, costs=costs_of(llm, session), clock=clock, say=say)
            row = _row(
                workload, session, found, model=model, allocator=one, settings=asked, scale=scale, start_s=started, first_s=first
            )
            if one == "paged" and "contiguous" in rows:
                row = replace(row, over_contiguous=ratios(row.median, rows["contiguous"].median))
            rows[one] = row
            yield row


def repeat(
    llm: LLM, workload: Workload, runs: int, *, costs: Costs | None = None, clock: Clock | None = None,
    say: Progress | None = None,
) -> tuple[float | None, list[Measures]]:  # fmt: skip
    """Runs of a workload, each with an empty prefix cache; and the seconds of a run before them, which a GPU needs."""
    clock = clock or WallClock()
    say = say or (lambda words: None)
    first = None
    if llm.engine.runner.device.type == "cuda":
        # kernels are compiled for lengths as they come, and kept on disk: that is no part of what a server does all day
        say(f"{workload.name}: warming up")
        began = clock.now()
        drive(llm.engine, workload, clock=clock)
        first = clock.now() - began
    return first, [_run(llm, workload, costs, clock, f"{workload.name}, run {n} of {runs}", say) for n in range(1, runs + 1)]


def costs_of(llm: LLM, session: Session) -> Costs | None:
    """Of its model and cache here; None where no product was measured in the model's dtype."""
    decoder, pages = llm.engine.runner.decoder, llm.pages
    config = decoder.config
    dtype = decoder.embedding.dtype
    word = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    if not session.ceilings.matmul_tflops.get(word):
        return None
    numbers = sum(weight.numel() for weight in decoder.parameters())
    # a table is looked up; the head, which may be the same table, is multiplied
    looked_up = 0 if config.tie else decoder.embedding.numel()
    layers = sum(weight.numel() for layer in decoder.layers for weight in layer.parameters())
    return Costs(
        weight_bytes=(numbers - looked_up) * dtype.itemsize,
        token_bytes=pages.nbytes // (pages.storage.shape[0] * pages.storage.shape[3]),
        token_flops=2 * layers,
        bytes_s=session.ceilings.copy_gbs * 1e9,
        flops_s=session.ceilings.matmul_tflops[word] * 1e12,
    )


def ratios(paged: Measures, contiguous: Measures) -> dict[str, float]:
    """How many times as good paging is: more requests a step and tokens a second, fewer steps."""
    return {
        "requests_per_step": paged.requests_per_step / contiguous.requests_per_step,
        "output_tok_s": paged.output_tok_s / contiguous.output_tok_s,
        "steps": contiguous.steps / paged.steps,
        "running": paged.running / contiguous.running,
    }


def _run(llm: LLM, workload: Workload, costs: Costs | None, clock: Clock, words: str, say: Progress) -> Measures:
    engine = llm.engine
    cuda = engine.runner.device.type == "cuda"
    engine.pool.forget_prefixes()
    if cuda:
        torch.cuda.reset_peak_memory_stats(engine.runner.device)
    course = drive(engine, workload, clock=clock, say=lambda progress: say(f"{words}: {progress}"))
    peak = torch.cuda.max_memory_allocated(engine.runner.device) if cuda else _process_bytes()
    return measures(course, costs=costs, peak_bytes=peak)


def settings_of(workload: Workload, decoder: Decoder) -> dict[str, Any]:
    """The workload's own; of the model's length as much as is used, up to a power of two so that an engine serves several."""
    longest = min(1 << (workload.longest - 1).bit_length(), decoder.config.max_len)
    return {"max_model_len": longest} | workload.settings


def _row(
    workload: Workload, session: Session, found: list[Measures], *, model: str, allocator: str, settings: dict[str, Any],
    scale: float, start_s: float, first_s: float | None,
) -> Row:  # fmt: skip
    return Row(
        workload=workload.name, purpose=workload.purpose, model=model, allocator=allocator, settings=settings, scale=scale,
        runs=len(found), first_s=first_s, start_s=start_s, median=_each(median, found), low=_each(min, found),
        high=_each(max, found), **session.about("bf16" if session.machine.type == "cuda" else "fp32"),
    )  # fmt: skip


def _each(of: Any, found: list[Measures]) -> Measures:
    """Number by number; None where a run has none."""
    columns = {part.name: [getattr(one, part.name) for one in found] for part in fields(Measures)}
    made: dict[str, Any] = {name: None if None in values else of(values) for name, values in columns.items()}
    return Measures(**made)


def _pace(trace: Trace) -> float | None:
    """Seconds from token to token, the mean."""
    return (trace.times[-1] - trace.times[0]) / (len(trace.times) - 1) if len(trace.times) > 1 else None


def _context(prompt: int, length: int) -> int:
    """Tokens that decoding reads from the cache, all steps of an answer together; its first token comes with the prompt."""
    steps = max(length - 1, 0)
    return steps * prompt + steps * (steps + 1) // 2


def _process_bytes() -> int:
    """The most memory that this process has had so far; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def tidy(device: torch.device) -> None:
    """Gives back what an engine had."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
