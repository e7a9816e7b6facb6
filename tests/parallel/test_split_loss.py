"""`linear_cross_entropy(group=)` on 1 to 4 processes over gloo, beside one process's loss in fp64."""

import pytest

from rooftile import fused
from rooftile.errors import InvalidInput
from tests.parallel import loss_cases as cases
from tests.parallel.processes import run_on


def test_agrees_with_one_process_and_is_as_exact():
    """A part of the hidden states' gradient that is rounded before the sum would show."""
    for answers, errors in run_on(4, cases.on_four):
        assert len(answers) > 40
        assert not [(name, error) for name, error in answers if not error < 1e-12]
        for name, pairs in errors:
            for split, alone in pairs:
                assert split <= 1.1 * alone + 1e-7, name


def test_seams_and_refusals_on_every_rank():
    due = [
        "split is None and group",
        "split is 'tokens' and group is None",
        "split is 'rows'",
        "must be a mesh of 2 dimensions",
        "group is 'tp'",
        "vocabulary is 37 and split 'tokens'",
        "vocabulary is 36 and this rank has 37 rows",
        "vocabulary is 42 and the ranks have [37, 37] rows",
        "shift of split tokens",
        "linear_weight is a DTensor",
        "input is on meta; the group's backend moves tensors of cpu",
        "must be from 0 to 73",
        "under torch.func",
        "a second derivative of linear_cross_entropy",
        "all must agree",
        "all must agree",
    ]
    for found, sentences in run_on(2, cases.on_two):
        assert found == dict.fromkeys(found, True)
        for sentence, part in zip(sentences, due, strict=True):
            assert part in sentence


def test_without_a_group_there_is_a_sentence():
    (x, w, _), target, _ = cases.problem()
    with pytest.raises(InvalidInput, match="is not initialised"):
        fused.linear_cross_entropy(x, w, target, group=object(), split="tokens")
