"""`rooftile bench serving --url` measures a server as the driver measures an engine."""

from __future__ import annotations

import asyncio

import pytest

from rooftile.engine import SamplingParams
from rooftile.errors import InvalidInput
from rooftile_lab.bench import workloads
from rooftile_lab.bench.driver import fitted
from rooftile_lab.bench.measures import measures
from rooftile_lab.bench.over_http import body_of, drive, measure


def test_a_workload_over_http(server, llm) -> None:
    (workload,) = workloads.named(["W1"], factor=0.05)
    from dataclasses import replace

    workload = replace(workload, requests=fitted(workload, 370)[:12])
    course = asyncio.run(asyncio.wait_for(drive(workload, server.url, model="tiny"), 300))
    assert {trace.fate for trace in course.traces} == {"answered"}
    for ask, trace in zip(workload.requests, course.traces, strict=True):
        assert sum(trace.lengths) == len(trace.times) == ask.params.max_tokens
        assert trace.arrived <= trace.times[0] <= trace.times[-1] <= trace.ended
    found = measures(course)
    assert found.requests == 12
    assert found.output_tokens == sum(ask.params.max_tokens for ask in workload.requests)
    assert found.ttft_ms_p50 is not None


def test_clients_that_leave_and_wrong_requests_are_counted(server) -> None:
    (workload,) = workloads.named(["W9"], factor=0.02)
    from dataclasses import replace

    workload = replace(workload, requests=fitted(workload, 370))
    course = asyncio.run(asyncio.wait_for(drive(workload, server.url), 300))
    fates = [trace.fate for trace in course.traces]
    assert "waiting" not in fates
    assert fates.count("gone") > 0
    server.wait_until_idle()


def test_a_conversation_is_refused() -> None:
    with pytest.raises(InvalidInput, match="W6 goes on with the tokens of its answers"):
        list(measure(workloads.named(["W6"], factor=0.01), None, "http://127.0.0.1:1"))


def test_parameters_cross_in_openais_words() -> None:
    ask = workloads.WorkloadRequest([1], SamplingParams(max_tokens=5, ignore_eos=True, include_stop=True, n=2))
    body = body_of(ask)
    assert body["include_stop_str_in_output"] is True
    assert (body["max_tokens"], body["n"], body["ignore_eos"], body["temperature"]) == (5, 2, True, 1.0)
    assert "top_k" not in body
