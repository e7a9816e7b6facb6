"""The numbers of one run of a workload: rates, latencies, memory, and the share of the floor."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rooftile.cost.decoder import DecoderCost, tokens_read
from rooftile.hardware.chips import Rates
from rooftile_lab.bench.driver import Course, Trace

# seconds within which a request's first token, and each token after it, must come to count in the goodput
FIRST_TOKEN_S = 1.0
EACH_TOKEN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """One run. Rates and times cover the requests that were answered; None where no request has such a time.

    Percentiles interpolate between neighbours. Averages over time are weighted by the time that steps take.
    """

    seconds: float
    requests: int  # answered
    refused: int
    gone: int  # the client went away
    prompt_tokens: int
    output_tokens: int  # all answers to a prompt counted
    output_tok_s: float
    total_tok_s: float  # prompts, cached or not, and answers
    requests_s: float
    goodput_s: float  # requests per second with TTFT and TPOT within FIRST_TOKEN_S and EACH_TOKEN_S
    ttft_ms_p50: float | None  # from arrival to the first token
    ttft_ms_p90: float | None
    ttft_ms_p99: float | None
    itl_ms_p50: float | None  # between neighbouring tokens, all of them
    itl_ms_p90: float | None
    itl_ms_p99: float | None
    tpot_ms_p50: float | None  # its mean in a request
    tpot_ms_p90: float | None
    tpot_ms_p99: float | None
    e2e_ms_p50: float | None  # from arrival to the last token
    e2e_ms_p90: float | None
    e2e_ms_p99: float | None
    normalised_ms: float | None  # e2e over the length of the longest answer, mean over requests
    waste_percent: float  # share of the slots in used blocks that hold no token, average over time; shared slots count once
    saved_percent: float  # blocks saved by sharing over blocks without sharing, average over time
    running: float  # answers that run at once, average over time
    preemptions: int
    steps: int
    requests_per_step: float
    host_us_step: float  # the host's time per step without waiting for the GPU; on a CPU without the model's computation
    floor_percent: float | None  # the least time that the machine's ceilings allow, over the time that was taken
    peak_bytes: int  # the most that torch had handed out on a GPU, with model and cache; on a CPU the process's most


@dataclass(frozen=True, slots=True)
class Costs:
    """A model's sizes and the machine's ceilings."""

    model: DecoderCost
    rates: Rates

    def floor_s(self, course: Course) -> float:
        """The least seconds that a run could take with the steps that it took."""
        generated = sum(sum(trace.lengths) for trace in course.traces)
        cached = sum(tokens_read(trace.prompt, length) for trace in course.traces for length in trace.lengths)
        prompt = max(course.read - generated, 0)
        running = generated / course.steps if course.steps else 0.0
        return self.model.seconds(self.rates, steps=course.steps, cached=cached, running=running, prompt=prompt)


def measures(course: Course, *, costs: Costs | None = None, peak_bytes: int = 0) -> Measures:
    """The numbers of a run. `costs` gives the floor; without it there is none."""
    answered = [trace for trace in course.traces if trace.fate == "answered"]
    output = sum(sum(trace.lengths) for trace in answered)
    prompts = sum(trace.prompt for trace in answered)
    first = [trace.times[0] - trace.arrived for trace in answered]
    e2e = [trace.ended - trace.arrived for trace in answered]
    gaps = [after - before for trace in answered for before, after in pairwise(trace.times)]
    each = [pace for trace in answered if (pace := _pace(trace)) is not None]
    good = sum(trace.times[0] - trace.arrived <= FIRST_TOKEN_S and (_pace(trace) or 0.0) <= EACH_TOKEN_S for trace in answered)
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
        floor_percent=None if costs is None else 100 * costs.floor_s(course) / seconds,
        peak_bytes=peak_bytes,
    )


def _pace(trace: Trace) -> float | None:
    """The mean of the seconds between neighbouring tokens."""
    return (trace.times[-1] - trace.times[0]) / (len(trace.times) - 1) if len(trace.times) > 1 else None
