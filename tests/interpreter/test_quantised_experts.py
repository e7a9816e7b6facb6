"""The product of experts with quantised weights, in Triton's interpreter, against fp64 token by token."""

from __future__ import annotations

import pytest
import torch

from rooftile import moe
from tests.moe.test_quantised import FORMATS, SIZES, drawn, of_definition


@pytest.mark.parametrize("activation", ["silu", "clamped", "relu2"])
@pytest.mark.parametrize("word", FORMATS)
def test_the_kernel_multiplies_what_codes_stand_for(word: str, activation: str) -> None:
    for size in SIZES:
        given = drawn(size, word, activation)
        E = SIZES[size][2]
        more = {"up_bias": torch.randn(E, given[2].shape[0] // E), "down_bias": torch.randn(E, given[0].shape[1])}
        found = moe.experts(*given, activation=activation, backend="triton", **more)
        due = of_definition(*given, activation=activation, **{name: x.double() for name, x in more.items()})
        torch.testing.assert_close(found.double(), due, rtol=1e-4, atol=1e-4)
