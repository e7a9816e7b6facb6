"""Plans of attention on split sequences: bytes that are sent, predicted times, and the choice among methods."""

from dataclasses import replace

import pytest
import torch

from rooftile.errors import InvalidInput
from rooftile.exact.masks import CAUSAL, FULL, Window
from rooftile.exact.spec import Problem, Sizes, Spec
from rooftile.hardware.chips import chip_named
from rooftile.hardware.link import Link
from rooftile.parallel import memory, plan
from rooftile.parallel.estimates import planned
from rooftile.parallel.traffic import Sequence
from tests.parallel import plan_cases
from tests.parallel.processes import run_on

H200 = chip_named("NVIDIA H200")
NVLINK = Link(ranks=2, gbs=350.0, latency_us=20.0)


def problem(tokens=32_768, mask=CAUSAL, H=32, Hk=8, **options) -> Problem:
    spec = Spec(dtype=torch.bfloat16, dim=128, dim_v=128, group=H // Hk, mask=mask, scale=0.1, device="sm90", **options)
    return Problem(spec=spec, sizes=Sizes(B=1, T=tokens, S=tokens, H=H, Hk=Hk))


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_those_that_ranks_send(ranks):
    answers = run_on(ranks, plan_cases.counted, ranks)
    assert len(answers[0]) >= 24
    for found in answers:
        assert [each for each in found if each[1] != each[2]] == []


def test_groups_of_heads_give_the_same():
    for found in run_on(2, plan_cases.by_groups):
        for groups, difference in found:
            assert groups > 1
            assert difference < 1e-12


def test_the_link_is_measured_once_and_alike():
    (first, known, unknown), (second, _, _) = run_on(2, plan_cases.measured_link)
    assert first == second == known
    assert unknown
    assert first.gbs > 0
    assert first.latency_us > 0
    assert first.time_us(1e9 * first.gbs, 2) == pytest.approx(1e6 + 2 * first.latency_us)


def test_the_benchmark_compares_with_one_process_first():
    rows, nothing = run_on(2, plan_cases.benchmark)
    assert nothing == []
    assert [(row["backend"], row["phase"], row["reason"]) for row in rows] == [
        (backend, phase, "")
        for phase in ("fwd", "fwd+bwd") for backend in ("one-rooftile", "gather", "ulysses", "ring", "gather-balanced")
    ]  # fmt: skip
    for row in rows[1:5] + rows[6:]:
        assert row["layout"] == ("balanced" if row["backend"] == "gather-balanced" else "zigzag")
        assert row["difference"] < 1e-5
        assert row["scaling_ratio"] > 0
        assert row["sent_mib"] > 0
        assert row["predicted_us"] > 0


def test_one_rank_takes_one_device_s_time():
    found = plan(problem(), 1, replace(NVLINK, ranks=1), H200, phase="fwd+bwd")
    by_method = {each.method: each for each in found.estimates}
    assert by_method["gather"].exposed_us == 0
    assert by_method["gather"].attention_us == pytest.approx(found.one_us)
    assert by_method["gather"].bytes_sent == by_method["ring"].bytes_sent == 0


def test_a_slower_link_is_never_faster_and_the_time_of_one_device_counts():
    for phase in ("fwd", "bwd", "fwd+bwd"):
        fast, slow = (plan(problem(), 4, replace(NVLINK, gbs=gbs), H200, phase=phase) for gbs in (400.0, 4.0))
        for each in fast.estimates:
            other = next(one for one in slow.estimates if one.method == each.method)
            assert other.time_us > each.time_us
        half = plan(problem(), 4, NVLINK, H200, phase=phase, one_us=fast.one_us / 2)
        assert half.one_us == fast.one_us / 2
        assert half.chosen.attention_us == pytest.approx(fast.chosen.attention_us / 2)


def test_a_ring_hides_a_slow_link_and_heads_travel_less_than_keys():
    """Between machines the ring's transfers are under its attention; with as many key heads, gather sends the most."""
    slow = plan(problem(131_072), 8, replace(NVLINK, ranks=8, gbs=40.0), H200)
    assert slow.method == "ring"
    many = {each.method: each for each in plan(problem(131_072, Hk=32), 8, replace(NVLINK, ranks=8), H200).estimates}
    assert many["ulysses"].bytes_sent < many["gather"].bytes_sent / 2


def test_memory_decides_where_it_is_short():
    found = plan(problem(131_072), 8, replace(NVLINK, ranks=8), H200, phase="fwd")
    assert found.method == "gather"
    least = min(each.memory_bytes for each in found.estimates)
    short = plan(problem(131_072), 8, replace(NVLINK, ranks=8), H200, phase="fwd", most_bytes=least)
    assert short.method == "ring"
    assert "the fastest that fits in memory" in short.why


def test_a_window_sends_its_own_keys():
    found = plan(problem(131_072, CAUSAL & Window(4095)), 2, NVLINK, H200)
    assert found.method == "gather"
    assert found.chosen.bytes_sent < 2 * 4096 * 8 * 256 * 2 + 1
    assert str(found).endswith(found.why)
    assert found.why.startswith("gather is the fastest with")


def test_a_grid_hides_a_slow_link_between_hosts():
    """Two hosts of eight: heads stay within a host, and a rank's keys of its own heads travel between them."""
    slow, fast = replace(NVLINK, ranks=2, gbs=40.0), replace(NVLINK, ranks=8)
    found = plan(problem(131_072), (2, 8), (slow, fast), H200, phase="fwd+bwd")
    assert {each.method for each in found.estimates} == {"usp", "usp-gather"}
    assert found.ranks == 16
    alone = plan(problem(131_072), 16, replace(NVLINK, ranks=16, gbs=40.0), H200, phase="fwd+bwd")
    assert found.chosen.time_us < min(each.time_us for each in alone.estimates)
    one_host = plan(problem(131_072), (1, 8), (slow, fast), H200)
    ulysses = next(each for each in plan(problem(131_072), 8, fast, H200).estimates if each.method == "ulysses")
    assert one_host.chosen.bytes_sent == ulysses.bytes_sent
    assert one_host.chosen.exposed_us == pytest.approx(ulysses.exposed_us)


def test_methods_that_cannot_run_have_a_reason():
    found = plan(problem(H=20, Hk=5), 8, replace(NVLINK, ranks=8), H200)
    assert dict(found.refusals) == {"ulysses": "20 query heads and 5 key heads cannot be dealt out to 8 ranks"}
    assert "ulysses: 20 query heads" in str(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"phase": "backward"}, "phase is 'backward'; must be one of 'fwd', 'bwd', 'fwd\\+bwd'"),
        ({"layout": "spiral"}, "layout is 'spiral'; must be one of"),
        ({"ranks": 0}, "ranks is 0; must be at least 1"),
        ({"ranks": (2, 2, 2)}, "ranks is \\(2, 2, 2\\); must be at least 1, or rows"),
        ({"ranks": (2, 3)}, "no method runs on 2 rows of 3 ranks: 32 query heads and 8 key heads"),
        ({"problem": Problem(spec=problem().spec, sizes=Sizes(B=1, T=8, S=9, H=32, Hk=8))}, "8 queries and 9 keys"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(InvalidInput, match=words):
        plan(**{"problem": problem(), "ranks": 2, "link": NVLINK, "machine": H200} | arguments)


def test_auto_takes_the_plan_s_method_and_gather_where_nothing_is_known():
    sequence = Sequence(tokens=131_072, ranks=8, mask=FULL, H=32, Hk=32, D=128, Dv=128)
    spec = problem(mask=FULL, Hk=32).spec
    link = replace(NVLINK, ranks=8)
    due = plan(problem(131_072, FULL, Hk=32), 8, link, H200).method
    assert due != "gather"
    known = {"needs_grad": False, "device_bytes": 141 << 30}
    found = planned(sequence, spec, link, "NVIDIA H200", **known)
    assert found is not None
    assert found.method == due
    assert planned(sequence, spec, None, "NVIDIA H200", **known) is None
    assert planned(sequence, spec, link, "a chip of tomorrow", **known) is None


def test_a_plan_prints_the_bytes_of_what_else_makes_a_sequence_fit():
    lines = memory.loss(32_768, vocabulary=1_000, dim=64, ranks=2, split="tokens"), memory.offload(32_768, dim=64, blocks=32)
    found = plan(problem(), 2, NVLINK, H200, memories=iter(lines))
    assert found.memories == lines
    assert str(found).endswith("\n".join(map(str, lines)))
