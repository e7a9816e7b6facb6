"""Other libraries' argument names get the line to write, and no advice that is for other attention."""

import pytest
import torch

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.recommend import hstu_attention_paged
from rooftile.recommend.foreign_words import HSTU, TARGET

ROWS, CU = torch.randn(4, 2, 8), torch.tensor([0, 4])


@pytest.mark.parametrize("word", HSTU)
def test_hstu(word) -> None:
    with pytest.raises(InvalidInput, match=rf"^hstu_attention has no argument {word}: (write|leave it out)"):
        rt.hstu_attention(ROWS, ROWS, ROWS, CU, alpha=0.3, **{word: 1})


@pytest.mark.parametrize("word", TARGET)
def test_target(word) -> None:
    with pytest.raises(InvalidInput, match=rf"^target_attention has no argument {word}: (write|leave it out)"):
        rt.target_attention(ROWS[None], ROWS, CU, **{word: 1})


def test_pairs_have_no_bias_and_no_mask() -> None:
    for call in (
        lambda: rt.hstu_attention(ROWS, ROWS, ROWS, CU, alpha=0.3, rab=torch.zeros(4, 4)),
        lambda: hstu_attention_paged(ROWS, alpha=0.3, attn_mask=torch.ones(4, 4)),
        lambda: rt.target_attention(ROWS[None], ROWS, CU, attn_bias=torch.zeros(4, 4)),
    ):
        with pytest.raises(InvalidInput, match=r"there is no (bias|mask) of pairs"):
            call()
