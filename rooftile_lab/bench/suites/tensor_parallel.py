"""An engine on two ranks beside one, with random weights: steps that decode, and a workload.

    decode-B-MODEL    steps of B sequences of 640 tokens that all decode
    W1-MODEL          the workload W1 (see `workloads`), all its requests at once

The rows of two ranks have `of_one_rank_ratio`: one rank's time over theirs, in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from rooftile.cost.session import Session
from rooftile.diagnosis.programs.decode_step import DecodeSizes, decoding
from rooftile.engine.llm import LLM
from rooftile_lab.bench.driver import drive, fitted
from rooftile_lab.bench.models import MODELS
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.workloads import named
from rooftile_lab.bench.works import tidy, words_of_error

GPU = ("decode-1-8b", "W1-8b", "decode-256-8b", "decode-1-1b", "decode-256-1b")
CPU = ("decode-1-tiny", "decode-8-tiny", "W1-tiny")
QUICK = ("decode-1-1b",)

RANKS = (1, 2)
CONTEXT, STEPS, RUNS = 640, 64, 3
# the share of W1 that a CPU computes
SMALL = 0.02


class Case(NamedTuple):
    """A measurement of one model."""

    name: str
    what: str
    batch: int  # 0 for a workload
    model: str

    @classmethod
    def of(cls, name: str) -> Case:
        """Reads a case's name."""
        what, *batch, model = name.split("-")
        return cls(name, what, int(batch[0]) if batch else 0, model)


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each case and number of ranks."""
    cases = [Case.of(name) for name in names]
    for model in dict.fromkeys(case.model for case in cases):
        yield from _rows(session, model, [case for case in cases if case.model == model], say)


def _rows(session: Session, model: str, cases: Sequence[Case], say: Progress) -> Iterator[Row]:
    config = replace(MODELS[model], dtype=torch.bfloat16 if session.device.type == "cuda" else torch.float32)
    times: dict[str, float] = {}
    for ranks in RANKS:
        say(f"{model}: starting {ranks} ranks")
        began, left = perf_counter(), list(cases)
        about: dict[str, Any] = {
            "suite": "tensor-parallel",
            "backend": f"{ranks} ranks" if ranks > 1 else "1 rank",
            "phase": "serve",
        }
        try:
            most = max([8, *(case.batch for case in cases)])
            llm = LLM(
                config, device=session.device.type, tensor_parallel_size=ranks, max_model_len=2048, max_num_seqs=most, seed=0
            )
            started = perf_counter() - began
            try:
                while left:
                    say(f"{left[0].name}: {ranks} ranks")
                    samples = _samples(llm, left[0], session.device.type)
                    case = left.pop(0)
                    measures = {"start_s": figures(started), "cache_bytes": figures(llm.caches.nbytes)}
                    if case.name in times:
                        measures["of_one_rank_ratio"] = figures(times[case.name] / median(samples))
                    times.setdefault(case.name, median(samples))
                    problem = f"{case.batch} sequences of {CONTEXT}" if case.batch else "all requests at once"
                    yield timed_row(
                        session, samples, dtype=session.dtype, case=case.name, problem=problem, measures=measures,
                        settings={"model": model, "tensor_parallel_size": ranks, "runs": RUNS}, **about,
                    )  # fmt: skip
            finally:
                llm.close()
                del llm
        except Exception as error:
            # the other models are still measured
            reason = f"failed: {words_of_error(error, 600)}"
            say(f"{model} on {ranks} ranks {reason}")
            yield from (timed_row(session, [], case=case.name, reason=reason, **about) for case in left)
        tidy(session.device)


def _samples(llm: LLM, case: Case, device: str) -> list[float]:
    """Microseconds of a step, or of the workload, in each run after a first one."""
    if case.batch:
        with decoding(llm.engine, DecodeSizes(case.batch, CONTEXT, STEPS)):
            return [_step_us(llm) for _ in range(RUNS + 1)][1:]
    scale = 1.0 if device == "cuda" else SMALL
    # the first is short: it is there for what is prepared once
    few, whole = (named([case.what], factor=scale * share)[0] for share in (0.1, 1.0))
    vocabulary = llm.engine.runner.decoder.config.vocab_size
    few, whole = (replace(one, requests=fitted(one, vocabulary)) for one in (few, whole))
    drive(llm.engine, few)
    found = []
    for _ in range(RUNS - 1):
        llm.engine.pool.forget_prefixes()
        found.append(1e6 * drive(llm.engine, whole).seconds)
    return found


def _step_us(llm: LLM) -> float:
    began = perf_counter()
    for _ in range(STEPS):
        llm.engine.step()
    return (perf_counter() - began) / STEPS * 1e6
