"""The study of recall on a GPU: every method trains in bf16, and Loki decodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rooftile_lab.bench.learning import needle, study
from rooftile_lab.bench.learning.english import English
from rooftile_lab.bench.learning.methods import EXACT, METHODS, NOT_CAUSAL
from rooftile_lab.bench.suites.recall import PLANS

pytestmark = pytest.mark.gpu
PLAN = replace(PLANS["cuda"], batch=10, steps=3, rates=(1e-3,), tests=4, english_steps=2)
CUDA = torch.device("cuda")


def quiet(words: str) -> None:
    """No progress."""


@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains(method: str) -> None:
    found = study.learn_recall(method, PLAN, CUDA, quiet)
    assert found.trained.is_finite
    assert set(found.by_pairs) == set(PLAN.task.pairs)
    if method not in NOT_CAUSAL:
        assert study.learn_english(method, PLAN, English.read(CUDA), CUDA, quiet).trained.is_finite


def test_loki_decodes() -> None:
    model = study.learn_recall(EXACT, PLAN, CUDA, quiet).model
    found = needle.needles(model, PLAN.task, 4, torch.Generator(CUDA).manual_seed(0))
    assert list(found) == list(needle.WAYS)
