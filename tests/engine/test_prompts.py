"""Token ids of prompts: plain integers are checked as a whole, and others one by one."""

from __future__ import annotations

import numpy as np
import pytest

from rooftile.engine.text.prompt import check_tokens
from rooftile.errors import InvalidInput


@pytest.mark.parametrize("prompt", [[0, 9, 5], (0, 9, 5), np.array([0, 9, 5]), [np.int64(0), 9, np.uint8(5)]])
def test_good_ids_are_a_list_of_the_engines_own(prompt) -> None:
    found = check_tokens(prompt, 10)
    assert found == [0, 9, 5]
    assert {type(each) for each in found} == {int}
    assert found is not prompt


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "no token"), ([0, 10], "has 10 for a token"), ([-1, 3], "has -1 for a token"), ([True, 3], "has True for a token"),
        ([3, 1.0], r"has 1\.0 for a token"), ([3, "4"], "has '4' for a token"), ([3, None], "has None for a token"),
    ],
)  # fmt: skip
def test_bad_ids_are_named(prompt, said) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_tokens(prompt, 10)
