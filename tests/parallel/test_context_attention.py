"""`context_attention` on 2 to 4 processes over gloo, beside one process's attention in fp64."""

import itertools

import pytest
import torch

from rooftile.exact.masks import CAUSAL, FULL, Window
from rooftile.parallel.layouts import ranges
from rooftile.parallel.pieces import share_of
from tests.parallel import context_cases
from tests.parallel.processes import run_on


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_agrees_with_one_process(ranks):
    for answers in run_on(ranks, context_cases.agreement, ranks):
        assert len(answers) > 50
        # gradients of scores that are 30 times as steep
        wrong = [(name, error) for name, error in answers if not error < (1e-10 if "far" in name else 1e-12)]
        assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["gather", "ulysses", "ring"])
def test_is_as_exact_as_one_process(dtype, method):
    """Gradients of keys come from four ranks: each part rounded to bf16 would show."""
    for split, alone in run_on(4, context_cases.errors, dtype, method)[0]:
        # parts of a ring are merged by their lse, whose rounding shows in fp32 only
        assert split <= (1.3 if method == "ring" and dtype == torch.float32 else 1.1) * alone


def test_meshes_of_two_dimensions_agree_with_one_process():
    for answers in run_on(4, context_cases.on_grids):
        assert len(answers) == 30
        assert [(name, error) for name, error in answers if not error < 1e-12] == []


def test_meshes_are_refused_in_sentences():
    due = [
        "group is a mesh of 3 dimensions",
        "method 'usp' deals 5 query heads and 5 key heads out to 2 ranks",
        "method 'usp' got a bias",
        "method 'ring' on a mesh of two dimensions",
        "method 'usp' on one group of 2 ranks",
        "all must agree",
        "method 'ulysses' on a mesh of two dimensions",
        "group is a mesh of 2 dimensions",
    ]
    for found in run_on(2, context_cases.refused_grids):
        for sentence, part in zip(found, due, strict=True):
            assert part in sentence


def test_ranks_may_have_one_token_or_none():
    for found in run_on(4, context_cases.few_tokens):
        assert max(found) < 1e-4


def test_nan_behind_the_mask_stays_there():
    for found in run_on(2, context_cases.hidden_nan):
        for finite in found:
            assert finite[:24] == finite[24:]
        assert found[0][:24] == [True] * 23 + [False]


def test_bits_are_the_same_where_they_are_promised():
    for found in run_on(2, context_cases.same_bits):
        assert found == [True] * 12


def test_autocast_is_that_of_one_process():
    for found in run_on(2, context_cases.under_autocast):
        for dtype, of_gradient, difference in found:
            assert (dtype, of_gradient) == ("torch.bfloat16", "torch.float32")
            assert difference < 0.02


def test_ranks_share_one_draw():
    for found in run_on(2, context_cases.drawn):
        assert len(found) == 6
        assert [name for name, right in found if not right] == []


def test_refusals_are_sentences_on_every_rank():
    due = [
        "method is 'fast'; must be one of",
        "layout is 'spiral'; must be one of",
        "layout is 'balanced' without packed documents",
        "deals 5 query heads and 5 key heads out to 2 ranks",
        "group is 'cp'; must be a process group",
        "the layout 'zigzag' gives it 15 of 30",
        "tokens is 1.5; must be an integer",
        "gives it",
        "dropout is 1.5; must be a probability",
        "seed is 0.5; must be an int",
        "context_attention under torch.func",
        "alibi is (3,); must be (H,) = (4,)",
        "mask causal & targets(2) in attention over a sequence that ranks hold in parts; has masks without targets",
        "bias is (4, 12, 12); must broadcast to (B, H, rows, T), (1, 4, 6, 12)",
        "'ulysses' got a bias",
        "all must agree",
        "all must agree",
        "all must agree",
        "method is 'fast'",
    ]
    answers = run_on(2, context_cases.refused)
    for found in answers:
        for sentence, part in zip(found, due, strict=True):
            assert part in sentence
    assert answers[0][-1].startswith("rank 1 refused its arguments: method is 'fast'")


def test_tokens_are_dealt_out_and_put_together():
    ranks = 3
    for answers in zip(*run_on(ranks, context_cases.dealt, ranks), strict=True):
        held = [answer[0][0] for answer in answers]
        assert sorted(itertools.chain(*held)) == list(range(11))
        assert max(map(len, held)) - min(map(len, held)) <= 1
        starts = [0] * 4 + [4] * 7
        for own, whole, grad, within in answers:
            assert whole == [list(range(11))]
            # the losses of ranks 0, 1 and 2 ask for 1 + 2 + 3 times the position
            assert grad == [[6 * t for t in own[0]]]
            assert within == [int(t) - starts[int(t)] for t in own[0]]


def test_documents_that_lack_or_do_not_fit_are_refused_in_sentences():
    due = ["layout is 'balanced' without packed documents; it needs their offsets"] * 4
    due += ["cu ends at 11; must end at 12, the number of tokens of the whole pack"] * 3
    due += ["cu is [0, 12]; must be a tensor (B + 1,)"]
    for found in run_on(2, context_cases.refused_documents):
        for sentence, part in zip(found, due, strict=True):
            assert part in sentence


def test_a_window_moves_its_own_keys_and_nothing_else():
    """At 128k tokens on 8 ranks a window of 1,024 needs as many keys before each of a rank's two ranges."""
    T, P = 131_072, 8
    sent = [share_of(CAUSAL & Window(1_023), ranges(T, P, "zigzag"), rank, None).exchange.tokens_sent for rank in range(P)]
    # two boundaries a rank; the first range has none before it, and the middle two ranges are one rank's
    assert sum(sent) == 1_023 * (2 * P - 2)
    whole = [share_of(FULL, ranges(T, P, "zigzag"), rank, None).exchange.tokens_sent for rank in range(P)]
    assert sum(whole) == T * (P - 1)


def test_zigzag_shares_causal_work_evenly():
    from rooftile.exact.masks import pairs

    work = []
    for rank in range(4):
        pieces = [local.piece for local in share_of(CAUSAL, ranges(4_096, 4, "zigzag"), rank, None).pieces]
        work.append(sum(pairs(p.mask, p.t_stop - p.t_start, p.s_stop - p.s_start) for p in pieces))
    assert sum(work) == 4_096 * 4_097 // 2
    assert max(work) < 1.001 * min(work)
