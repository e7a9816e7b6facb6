"""Target attention's kernels compile without a GPU: on matrix instructions, with what a program may have."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile import recommend
from tests.kernels.recorded import SHARED, compiled, recorded

SEARCH = ("_column_maxima", "_bounds", "_collect", "_choose", "_walk")


@pytest.mark.parametrize(
    ("dim", "weights", "dtype", "sm"),
    [
        (64, "silu", torch.bfloat16, 80),
        (128, "softmax", torch.bfloat16, 90),
        (128, "silu", torch.bfloat16, 90),
        (256, "softmax", torch.bfloat16, 90),
        (64, "silu", torch.float32, 90),
    ],
)
def test_whole_histories(dim: int, weights: str, dtype: torch.dtype, sm: int) -> None:
    q, keys = (torch.randn(*shape, dim, dtype=dtype, requires_grad=True) for shape in ((2, 96, 4), (1536, 2)))
    cu, bias = torch.tensor([0, 512, 1536]), torch.randn(1536, requires_grad=True)
    with recorded(sm) as launches:
        o = recommend.target_attention(q, keys, cu, bias=bias, weights=weights, backend="triton")
        o.sum().backward()
    assert sorted(one.name for one in launches.values()) == ["_gradients_of_candidates", "_gradients_of_events", "_outputs"]
    for one in launches.values():
        found = compiled(one, sm)
        assert found.shared <= SHARED[sm]
        assert found.matrix or dtype == torch.float32
        assert found.hot_spills == 0


@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (64, torch.float32)])
def test_chosen_events(dim: int, dtype: torch.dtype) -> None:
    q, keys = (torch.randn(*shape, dim, dtype=dtype, requires_grad=True) for shape in ((2, 96, 4), (1536, 2)))
    cu, bias = torch.tensor([0, 512, 1536]), torch.randn(1536, requires_grad=True)
    with recorded(90) as launches:
        o = recommend.target_attention(q, keys, cu, bias=bias, top_k=100, backend="triton")
        o.sum().backward()
    # the search has checks of its own
    made = [one for one in launches.values() if one.name not in SEARCH]
    assert len(made) == 3
    for one in made:
        found = compiled(one, 90)
        assert found.shared <= SHARED[90]
        assert found.stack <= 64


@pytest.mark.parametrize(
    ("search", "k", "dtype"), [("exact", 128, torch.bfloat16), ("exact", 256, torch.float32), ("lsh", 100, torch.bfloat16)]
)
def test_searches(search: str, k: int, dtype: torch.dtype) -> None:
    q, keys = (torch.randn(*shape, 128, dtype=dtype) for shape in ((1, 96, 4), (1536, 2)))
    words = {"planes": recommend.simhash_planes(128, 64)} if search == "lsh" else {"bias": torch.randn(1536)}
    with recorded(90) as launches:
        recommend.target_attention(q, keys, torch.tensor([0, 1536]), top_k=k, search=search, backend="triton", **words)
    made = {one.name: one for one in launches.values() if not one.name.startswith("_chosen")}
    assert tuple(made) == SEARCH
    # sorts compile for long, and are alike
    found = {name: compiled(one, 90) for name, one in made.items() if k == 100 or name not in ("_choose", "_walk")}
    for one in found.values():
        assert one.shared <= SHARED[90]
    for name in ("_column_maxima", "_collect"):
        assert found[name].matrix or search == "lsh" or dtype == torch.float32
        assert found[name].hot_spills == 0
        # two programs of 16-bit features on a processor
        assert found[name].registers <= 128 or search == "lsh"


def test_softmax_over_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels before and after packed attention, which has checks of its own."""
    from rooftile.recommend.target.kernels import parts

    def attend(q, k, v, mask, options, settings, **words):
        return q.new_zeros(*q.shape[:2], v.shape[2], dtype=torch.float32), q.new_zeros(
            q.shape[1], q.shape[0], dtype=torch.float32
        )

    monkeypatch.setattr(parts, "parts_of", lambda batch: 8)
    monkeypatch.setattr(parts.api, "attend", attend)
    for dim, dtype in ((128, torch.bfloat16), (256, torch.float16)):
        q, keys = (torch.randn(*shape, dim, dtype=dtype) for shape in ((2, 96, 4), (1536, 2)))
        with recorded(90) as launches:
            recommend.target_attention(q, keys, torch.tensor([0, 512, 1536]))
        found = {one.name: one for one in launches.values()}
        assert list(found) == ["_copy_candidates", "_merge"]
        for one in found.values():
            assert compiled(one, 90).stack == 0
