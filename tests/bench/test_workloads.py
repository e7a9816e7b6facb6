"""The workloads of the benchmark of serving are what they are said to be."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist, mean

import pytest

from rooftile_lab.bench import workloads
from rooftile_lab.bench.driver import fitted
from rooftile_lab.bench.workloads import ALPACA, LONGEST, SHAREGPT, WORKLOADS, named, poisson


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_every_time(name: str) -> None:
    (one,), (other,) = named([name], factor=0.05), named([name], factor=0.05)
    assert one == other
    assert one.name == name
    assert one.requests


def test_w1_is_the_benchmark_that_others_publish() -> None:
    (workload,) = named(["W1"])
    prompts, limits = zip(*((len(ask.prompt), ask.params.max_tokens) for ask in workload.requests), strict=True)
    assert (len(prompts), sum(limits), sum(prompts)) == (256, 133_966, 142_827)
    assert min(prompts + limits) >= 100
    assert max(prompts + limits) <= 1024
    assert {(ask.params.ignore_eos, ask.params.temperature, ask.at) for ask in workload.requests} == {(True, 0.6, 0.0)}


def capped_mean(average: float, sigma: float) -> float:
    """E min(X, LONGEST) of a log-normal X."""
    mu = math.log(average) - sigma**2 / 2
    z, normal = (math.log(LONGEST) - mu) / sigma, NormalDist()
    return average * normal.cdf(z - sigma) + LONGEST * (1 - normal.cdf(z))


@pytest.mark.parametrize(("name", "lengths"), [("W2", SHAREGPT), ("W3", ALPACA), ("W8", SHAREGPT)])
def test_lengths_have_the_means_of_their_distribution(name: str, lengths: workloads.Lengths) -> None:
    (workload,) = named([name])
    assert len(workload.requests) == 1000
    prompts, limits = zip(*((len(ask.prompt), ask.params.max_tokens) for ask in workload.requests), strict=True)
    # the standard error of a mean of a thousand is 3 to 5 %
    assert mean(prompts) == pytest.approx(capped_mean(lengths.prompt, lengths.prompt_sigma), rel=0.06)
    assert mean(limits) == pytest.approx(capped_mean(lengths.answer, lengths.answer_sigma), rel=0.06)
    assert max(prompts + limits) <= LONGEST


def test_many_lengths_have_them_more_exactly() -> None:
    rng = workloads.Random(3)
    drawn = [SHAREGPT.draw(rng) for _ in range(50_000)]
    assert mean(prompt for prompt, _ in drawn) == pytest.approx(capped_mean(161.31, 1.2), rel=0.01)
    assert mean(answer for _, answer in drawn) == pytest.approx(capped_mean(337.99, 0.9), rel=0.01)


def test_arrivals_have_their_rate_and_gaps_of_a_poisson_process() -> None:
    (workload,) = named(["W3"], rate=8.0)
    assert workload.name == "W3@8"
    times = [ask.at for ask in workload.requests]
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert min(gaps) > 0
    assert mean(gaps) == pytest.approx(1 / 8, rel=0.06)
    # the deviation of an exponential is its mean
    assert math.sqrt(mean((gap - 1 / 8) ** 2 for gap in gaps)) == pytest.approx(1 / 8, rel=0.1)
    chat = poisson(named(["W6"], factor=0.1)[0], 1.0)
    assert [ask.at > 0 for ask in chat.requests] == [ask.after is None for ask in chat.requests]


@pytest.mark.parametrize("prefix", [80, 341, 2048])
def test_w4_begins_alike_and_goes_on_differently(prefix: int) -> None:
    (workload,) = named([f"W4-{prefix}"])
    prompts = [ask.prompt for ask in workload.requests]
    assert len(prompts) == 64
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) == 1
    assert len({tuple(prompt[prefix : prefix + 2]) for prompt in prompts}) > 60


def test_w5_has_samples_and_beams() -> None:
    found = named(["W5"], factor=0.01)
    assert len(found) == 12
    for workload in found:
        width = int(workload.name[-1])
        asked = {(ask.params.n, ask.params.beam_width) for ask in workload.requests}
        assert asked == {(width, width if "beam" in workload.name else None)}


def test_w9_has_a_fifth_that_goes_away_and_one_in_a_hundred_that_is_wrong() -> None:
    (workload,) = named(["W9"])
    gone = sum(ask.gone is not None for ask in workload.requests)
    assert 195 <= gone <= 200
    wrong = [ask for ask in workload.requests if not ask.prompt or not 0 <= ask.prompt[0] <= 10_000]
    assert len(wrong) == 10
    kept = fitted(workload, 512)
    assert max(max(ask.prompt, default=0) for ask in kept if ask.prompt and ask.prompt[0] < 1 << 20) < 512
    assert sum(not ask.prompt or not 0 <= ask.prompt[0] < 512 for ask in kept) == 10


def test_w7_and_w10_have_their_lengths() -> None:
    (long,), (alone,) = named(["W7"]), named(["W10"])
    assert {(len(ask.prompt), ask.params.max_tokens) for ask in long.requests} == {(32_768, 256)}
    assert (len(long.requests), long.longest) == (32, 33_024)
    assert [(len(ask.prompt), ask.params.max_tokens) for ask in alone.requests] == [(128, 512)]


def test_w11_samples_four_answers_to_the_first_prompts_of_w1() -> None:
    (uniform,), (several,) = named(["W1"]), named(["W11"])
    assert [ask.prompt for ask in several.requests] == [ask.prompt for ask in uniform.requests[:64]]
    assert {(ask.params.n, ask.params.max_tokens, ask.params.temperature, ask.params.ignore_eos) for ask in several.requests} == {
        (4, 128, 0.6, True)
    }
