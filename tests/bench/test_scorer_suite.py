"""The suite of scorers: contestants whose states or scores are not the model's are not timed."""

from __future__ import annotations

import pytest
import torch

from rooftile_lab.bench.suites import scorer


@pytest.mark.parametrize("phase", ["score", "clicks"])
@pytest.mark.parametrize("who", scorer.FORMATS)
def test_other_pages_are_refused(phase: str, who: str) -> None:
    torch.manual_seed(0)
    problem = scorer.problem_of(phase, 2, 16, 3, 5, 40, torch.device("cpu"), torch.float32)
    scorers = scorer.filled(problem, scorer.FORMATS[who])
    assert scorer.refusal(who, scorers, problem) == ""
    # the first user has the pages of the second
    scorers.forget(0)
    scorers.append(0, problem.events[1])
    assert "off the model's; may be" in scorer.refusal(who, scorers, problem)
