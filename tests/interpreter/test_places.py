"""Parts of a problem on the Triton kernels: dropout, ALiBi and a bias have the places of the whole (`rooftile.exact.places`)."""

from __future__ import annotations

import pytest
import torch

from rooftile.exact.masks import FULL
from rooftile.exact.ops.attention import run_backward, run_forward
from rooftile.exact.places import Place, with_places
from rooftile.exact.spec import Spec

# rows and keys of a sequence of 50 tokens, past a tile of each, and heads of 6
ROWS, KEYS, HEADS = (7, 30), (13, 48), (2, 6)
DROPOUT, SEED = 0.4, torch.tensor([2**41 + 3])


@pytest.mark.parametrize("packed", [False, True])
def test_parts_have_the_places_of_the_whole(packed):
    """The part's results equal the definition's, whose random bits and distances belong to the whole sequence."""
    torch.manual_seed(0)
    T, S, H = ROWS[1] - ROWS[0], KEYS[1] - KEYS[0], HEADS[1] - HEADS[0]
    outer = () if packed else (2,)
    # packed: two sequences with places of their own
    rows, keys = (T + 9, S + 5) if packed else (T, S)
    q, k, v = torch.randn(*outer, rows, H, 16), torch.randn(*outer, keys, 2, 16), torch.randn(*outer, keys, 2, 16)
    alibi = torch.rand(H)
    bias = torch.randn(H, rows, S) if packed else torch.randn(1, H, T, S)
    places = (Place(3, 2, 7, 13), Place(5, 2, 40, 0)) if packed else (Place(0, 2, 7, 13), Place(1, 2, 7, 13))
    options = [bias, alibi, with_places(SEED, places, torch.device("cpu"))]
    if packed:
        options += [torch.tensor([0, T, T + 9], dtype=torch.int32), torch.tensor([0, S, S + 5], dtype=torch.int32)]
    spec = Spec(
        dtype=torch.float32, dim=16, dim_v=16, group=2, mask=FULL, scale=0.3, dropout=DROPOUT, has_bias=True, has_alibi=True,
        placed=True, needs_grad=True, bias_grad=True, layout="packed" if packed else "dense",
    )  # fmt: skip
    do = torch.randn(*outer, rows, H, 16)
    found = {}
    for backend in ("triton", "tiled", "eager"):
        o, lse = run_forward(q, k, v, options, spec.code, backend)
        found[backend] = [o, lse, *run_backward(do, None, q, k, v, o, lse, options, spec.code, backend)]
    for backend in ("triton", "tiled"):
        for got, due in zip(found[backend], found["eager"], strict=True):
            torch.testing.assert_close(got, due, atol=2e-5, rtol=2e-5)
    if not packed:
        _equals_the_whole(q, k, v, alibi)


def _equals_the_whole(q, k, v, alibi):
    """The definition itself: the same rows, keys and heads of a whole call, where a bias hides all other keys."""
    T, H = 50, 6
    wide = torch.zeros(2, T, H, 16)
    whole_q, whole_k, whole_v = wide.clone(), torch.zeros(2, T, 3, 16), torch.zeros(2, T, 3, 16)
    whole_q[:, slice(*ROWS), slice(*HEADS)] = q
    whole_k[:, slice(*KEYS), 1:], whole_v[:, slice(*KEYS), 1:] = k, v
    slopes = torch.zeros(H)
    slopes[slice(*HEADS)] = alibi
    hidden = torch.full((1, 1, 1, T), float("-inf"))
    hidden[..., slice(*KEYS)] = 0.0
    spec = {"dtype": torch.float32, "dim": 16, "dim_v": 16, "group": 2, "mask": FULL, "scale": 0.3, "dropout": DROPOUT}
    whole = Spec(**spec, has_bias=True, has_alibi=True)
    o, _ = run_forward(whole_q, whole_k, whole_v, [hidden, slopes, SEED], whole.code, "eager")
    own = Spec(**spec, has_alibi=True, placed=True)
    seed = with_places(SEED, (Place(0, 2, 7, 13), Place(1, 2, 7, 13)), torch.device("cpu"))
    due, _ = run_forward(q, k, v, [alibi, seed], own.code, "triton")
    torch.testing.assert_close(due, o[:, slice(*ROWS), slice(*HEADS)], atol=2e-5, rtol=2e-5)
