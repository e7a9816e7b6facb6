"""Recurrences over sequences that 1 to 4 ranks hold, beside one process in fp64; all of it in one start of four processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rooftile.recurrent.split.part import shares_of
from rooftile.recurrent.split.plan import DeltaSizes, plan_delta, plan_ssd
from tests.parallel import recurrence_cases
from tests.parallel.processes import run_on

RANKS = 4


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_on(RANKS, recurrence_cases.every, RANKS)


def test_agrees_with_one_process(answers):
    """Outputs, last states, and the gradients of all inputs, first states and parameters."""
    for rank, answer in enumerate(answers):
        for ranks, found in enumerate(answer["agreement"], 1):
            assert (found is None) == (rank >= ranks)
            assert found is None or len(found) > 70
            assert [(name, error) for name, error in found or () if not error < 1e-12] == []


def test_layers_follow_the_context(answers):
    for answer in answers:
        assert len(answer["layers"]) == 12
        assert [(name, error) for name, error in answer["layers"] if not error < 1e-11] == []


def test_a_hybrid_trains_as_one_process_does(answers):
    """Mamba-2, attention and rotary positions in the context, whose lengths differ between ranks, or are documents."""
    for answer in answers:
        assert len(answer["hybrid"]) == 3
        assert max(answer["hybrid"]) < 1e-10


def test_refusals_are_sentences_on_every_rank(answers):
    due = [
        "causal_conv inside rooftile.parallel.context with layout 'zigzag'; a recurrence needs consecutive tokens",
        "causal_conv inside rooftile.parallel.context with layout 'balanced'; a recurrence needs consecutive tokens",
        "cu of causal_conv inside rooftile.parallel.context; give the whole pack's offsets to the context",
        "a pack has a batch of 1",
        "a step of causal_conv inside rooftile.parallel.context",
        "with a group under FULL",
        "causal_conv ran again in a backward, outside of the rooftile.parallel.context",
        "the layout 'contiguous' gives it",
        "group is 'cp'; must be a process group",
        "backend 'eager' of linear attention with a group",
        "backend 'triton' cannot run causal_conv",
        "2 key heads are not a multiple of 4 ranks",
        "method is 'ring'; must be one of",
        "causal_conv with a group under torch.func",
    ]
    for answer in answers:
        for sentence, part in zip(answer["refused"], due, strict=True):
            assert part in sentence


def test_no_rank_waits_for_one_that_refuses(answers):
    due = [
        "rank 1 was given x (1, any, 12) in bfloat16; rank 0 was given x (1, any, 12) in float32, and all must agree",
        "rank 1 refused its arguments: weight is (12, 4), so W is 12; W must be 5",
        "rank 1 was given a call of gated_delta; rank 0 was given a call of gated_delta by heads",
        "rank 1 was given gradients False; rank 0 was given gradients True",
        "rank 1 refused its arguments: linear attention with a group under FULL",
        "rank 1 was given weight (12, 3) in float32; rank 0 was given weight (12, 4) in float32",
        "",
        "",
        "validate is 'yes'",
    ]
    for rank, answer in enumerate(answers):
        for sentence, part in zip(answer["agreed"], due, strict=True):
            assert part.removeprefix("rank 1 refused its arguments: " if rank == 1 else "") in sentence
            assert bool(part) == bool(sentence), sentence


def test_nan_of_one_sequence_stays_there(answers):
    for answer in answers:
        for name, split, alone in answer["nan_stays"]:
            assert split == alone, name


def test_each_rank_sends_what_another_needs_and_nothing_else(answers):
    """A sequence that begins on the first of four ranks and ends on the last sends states to the ranks behind, no token."""
    got = [answer["bytes_sent"] for answer in answers]
    ssd, conv, delta = (2 * 4 * 5 * 6, 2 * 4), (2 * 7 * 3, 2), (2 * 4 * 6 * 5, 2 * 4 * 6 * 6)
    for place, (state, decay) in ((0, ssd), (3, conv), (6, delta)):
        # the first rank has no map: its state is the true one. The last one sends nothing
        assert [sent[place] // 8 for sent in got] == [3 * state, 2 * (state + decay), state + decay, 0]
        # one of the two sequences has all of the ranks behind the first border; nothing but its row travels
        assert [sent[place + 1] // 8 for sent in got] == [3 * state // 2, (state + decay), (state + decay) // 2, 0]
        # sequences end at every border
        assert [sent[place + 2] for sent in got] == [0, 0, 0, 0]


def test_shares_cover_each_sequence_once():
    cu = (0, 1, 1, 20, 37)
    held = [share.cu[-1] for share in shares_of(cu, 4)]
    assert held == [10, 9, 9, 9]
    assert [share.spans for share in shares_of(cu, 4)] == [False, True, False, False]


def test_a_map_that_is_left_out_shows(answers):
    """The tests above would see it: a decay that is 1, a tail that is not the neighbour's, a matrix that is not transposed."""
    for difference in zip(*(answer["broken"] for answer in answers), strict=True):
        assert max(difference) > 1e-3


def test_the_plan_takes_what_costs_less():
    sizes = DeltaSizes(ranks=4, tokens=1_000, rows=1, Hk=16, Hv=32, Dk=128, Dv=128)
    plan = plan_delta(sizes)
    # 3/4 of q, k, v, y, of g in fp32 and of beta
    assert (plan.method, plan.bytes_sent) == ("heads", 750 * (2 * 2 * (16 + 32) * 128 + 32 * (4 + 2)))
    scan = plan_delta(sizes, "scan")
    # the second rank sends a state and a matrix to two ranks
    assert scan.bytes_sent == 2 * 32 * (128 * 128 + 128 * 128) * 4
    assert plan.share == 1 / 4 < scan.share < 0.4
    assert plan_delta(replace(sizes, ranks=1)).share == 1
    # plain operations find states in whole passes: a middle rank has three
    assert plan_delta(replace(sizes, by_channel=True), "scan").share == 3 / 4
    assert str(plan_delta(replace(sizes, ranks=3))).startswith("scan: sends")
    assert "16 key heads are not a multiple of 3 ranks" in str(plan_delta(replace(sizes, ranks=3)))
    # heads that are small have little to compute twice
    assert plan_delta(replace(sizes, Dk=16, Dv=16)).method == "scan"


def test_a_plan_of_states_counts_what_ranks_compute_twice():
    one, two, four = (plan_ssd(ranks, rows=3, H=64, P=64, N=128, G=1) for ranks in (1, 2, 4))
    assert (one.bytes_sent, one.share) == (0, 1)
    # a pass over states is a sixth of forward and backward
    assert 1.15 < 2 * two.share == 4 * four.share < 1.2
    # the first rank sends its state to each of the others
    assert (two.bytes_sent, four.bytes_sent) == (3 * 64 * 64 * 128 * 4, 3 * 3 * 64 * 64 * 128 * 4)
