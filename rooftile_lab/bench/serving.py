"""Runs workloads on an engine: the rows of `rooftile bench serving`. `measures.Measures` explains each number."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from rooftile.cost.session import Session
from rooftile.engine.caches.cost import cost_of
from rooftile.engine.llm import LLM
from rooftile.engine.settings.table import ranks_of
from rooftile.errors import InvalidInput
from rooftile.exact.spec import DTYPE_NAMES
from rooftile.models import Decoder, ModelConfig
from rooftile_lab.bench.driver import Clock, WallClock, drive, fitted
from rooftile_lab.bench.measures import Costs, Measures, measures
from rooftile_lab.bench.models import decoder_named, formats_of, shared_named
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, measured, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.workloads import Workload
from rooftile_lab.bench.works import tidy


def measure(
    workloads: Sequence[Workload], session: Session, *, model: str = "1b", allocator: str | None = None, scale: float = 1.0,
    runs: int = 3, settings: dict[str, Any] | None = None, clock: Clock | None = None, say: Progress | None = None,
) -> Iterator[Row]:  # fmt: skip
    """A row for each workload and allocator, as soon as it is measured.

    Args:
        workloads: as `workloads.named` makes them.
        session: the machine.
        model: one of `models.MODELS`, or a checkpoint's folder.
        allocator: for all workloads; None for those that each asks for.
        scale: the workloads' scale, for the rows.
        runs: how often each is run; every run begins with an empty prefix cache.
        settings: arguments of `LLM`, over the workloads' own; `weights` quantises the model once, before the first engine.
        clock: by default the machine's.
        say: called with a few words before each step.
    """
    if runs < 1:
        raise InvalidInput(f"runs is {runs}; must be at least 1")
    say = say or (lambda words: None)
    clock = clock or WallClock()
    say("the model")
    began = clock.now()
    settings = dict(settings or {})
    subject: Decoder | ModelConfig | Path
    if ranks_of(settings) > 1:
        # ranks make their parts by themselves
        subject = shared_named(model, session.device)
        config = subject if isinstance(subject, ModelConfig) else ModelConfig.from_folder(subject)
    else:
        subject = decoder_named(model, session.device, settings.pop("weights", "auto"))
        config = subject.config
    loaded = clock.now() - began
    llm: LLM | None = None
    started, known = 0.0, None
    for workload in workloads:
        workload = replace(workload, requests=fitted(workload, config.vocab_size))
        rows: dict[str, Row] = {}
        # what is compared comes first: the ratio is in the row of what it is compared with
        for one in reversed(workload.allocators) if allocator is None else (allocator,):
            asked = settings_of(workload, config) | settings | {"allocator": one}
            if llm is None or asked != known:
                say(f"{workload.name}: starting")
                llm = None
                tidy(session.device)
                began = clock.now()
                llm, known = LLM(subject, **asked), asked
                started = loaded + clock.now() - began
            first, found = repeat(llm, workload, runs, costs=costs_of(llm, session), clock=clock, say=say)
            formats = {"weights": formats_of(llm.engine.runner.decoder)}
            row = _row(
                workload, session, found, model=model, allocator=one, settings=asked | formats, scale=scale,
                start_s=started, first_s=first, reserved=rows.get("contiguous"),
            )  # fmt: skip
            rows[one] = row
            yield row


def repeat(
    llm: LLM, workload: Workload, runs: int, *, costs: Costs | None = None, clock: Clock | None = None,
    say: Progress | None = None,
) -> tuple[float | None, list[Measures]]:  # fmt: skip
    """The seconds of a first run, which compiles kernels on a GPU (None on a CPU); and `runs` runs after it.

    Every run begins with an empty prefix cache.
    """
    clock = clock or WallClock()
    say = say or (lambda words: None)
    first = None
    if llm.engine.runner.device.type == "cuda":
        # kernels are compiled for lengths as they come, and kept on disk: no server does that all day
        say(f"{workload.name}: warming up")
        began = clock.now()
        drive(llm.engine, workload, clock=clock)
        first = clock.now() - began
    return first, [_run(llm, workload, costs, clock, f"{workload.name}, run {n} of {runs}", say) for n in range(1, runs + 1)]


def costs_of(llm: LLM, session: Session) -> Costs | None:
    """The costs of an engine's model and cache; None if no matrix product was measured in the model's dtype."""
    decoder = llm.engine.runner.decoder
    word = DTYPE_NAMES[decoder.embedding.dtype]
    if not session.ceilings.matmul_tflops.get(word):
        return None
    return Costs(cost_of(decoder, llm.caches), session.ceilings.rates(word))


def ratios(paged: dict[str, float], reserved: dict[str, float]) -> dict[str, float]:
    """How many times as good paging is as reserving, from the measures of both: above 1 is better."""
    found = {name: paged[name] / reserved[name] for name in ("requests_per_step", "output_tok_s", "running")}
    return {f"{name}_over_reserved": ratio for name, ratio in (found | {"steps": reserved["steps"] / paged["steps"]}).items()}


def _run(llm: LLM, workload: Workload, costs: Costs | None, clock: Clock, words: str, say: Progress) -> Measures:
    engine = llm.engine
    cuda = engine.runner.device.type == "cuda"
    engine.pool.forget_prefixes()
    if cuda:
        torch.cuda.reset_peak_memory_stats(engine.runner.device)
    course = drive(engine, workload, clock=clock, say=lambda progress: say(f"{words}: {progress}"))
    peak = torch.cuda.max_memory_allocated(engine.runner.device) if cuda else _process_bytes()
    return measures(course, costs=costs, peak_bytes=peak)


def settings_of(workload: Workload, config: ModelConfig) -> dict[str, Any]:
    """Arguments of `LLM`: the workload's own, and a length that is a power of two, so that an engine serves several workloads."""
    longest = min(1 << (workload.longest - 1).bit_length(), config.max_len)
    return {"max_model_len": longest} | workload.settings


def _row(
    workload: Workload, session: Session, found: list[Measures], *, model: str, allocator: str, settings: dict[str, Any],
    scale: float, start_s: float, first_s: float | None, reserved: Row | None,
) -> Row:  # fmt: skip
    spreads = measured({name: values for name, values in columns(found).items() if name not in ("seconds", "peak_bytes")})
    measures = spreads["measures"] | {"start_s": figures(start_s)}
    if first_s is not None:
        measures["first_run_s"] = figures(first_s)
    if allocator == "paged" and reserved is not None:
        measures |= ratios(measures, reserved.measures)
    return timed_row(
        session, [one.seconds * 1e6 for one in found], dtype=session.dtype, suite="serving",
        case=case_name(workload.name, model, scale, settings), backend=f"rooftile, {allocator}", phase="serve",
        problem=workload.purpose, peak_bytes=max(one.peak_bytes for one in found),
        roofline_percent=measures.get("floor_percent"), settings={"model": model, "scale": scale} | settings,
        **(spreads | {"measures": measures}),
    )  # fmt: skip


def case_name(workload: str, model: str, scale: float, settings: dict[str, Any]) -> str:
    """A case as rows name it: "W1-8b", with formats of weights, the cache's dtype and the scale where they are not the usual."""
    kv_dtype, weights = settings.get("kv_dtype") or "auto", settings.get("weights", "auto")
    words = [
        workload,
        Path(model).name,
        "" if weights in ("auto", *DTYPE_NAMES.values()) else f"{weights}-weights",
        "" if kv_dtype == "auto" else f"{kv_dtype}-cache",
        "" if scale == 1 else f"x{scale:g}",
    ]
    return "-".join(word for word in words if word)


def columns(found: Sequence[Measures]) -> dict[str, list[float]]:
    """Each measure's values in all runs; none of a measure that a run lacks."""
    values = {part.name: [getattr(one, part.name) for one in found] for part in fields(Measures)}
    return {name: each for name, each in values.items() if None not in each}


def _process_bytes() -> int:
    """The most memory that this process has held so far; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
