"""Bad input: one sentence that says what came and what is due, before anything runs."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile.exact.cases import CASES, Case, tagged
from rooftile.exact.dispatch import BACKENDS
from rooftile.exact.spec import CallSettings, Options, decode
from rooftile.exact.validate import SwappedAxes, spec_code

NAN = math.nan
MASKS = "FULL, CAUSAL, Window, Prefix, Chunk, Targets, or some of them joined by &"


def randn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, **options)


def ints(*values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def dense(**changed: Any) -> Tensor:
    """Returns a correct call with B 2, T 5, S 6, H 4, Hk 2, D 8, with some arguments changed."""
    due = {"q": randn(2, 5, 4, 8), "k": randn(2, 6, 2, 8), "v": randn(2, 6, 2, 8)}
    return rt.attention(**due | changed)


def packed(**changed: Any) -> Tensor:
    """Returns a correct packed call with two sequences, of 3 and 7 queries and of 8 and 4 keys, with some arguments changed."""
    due = {"q": randn(10, 4, 8), "k": randn(12, 2, 8), "v": randn(12, 2, 8)}
    return rt.attention_packed(**due | {"cu_q": ints(0, 3, 10), "cu_k": ints(0, 8, 12)} | changed)


# the changed arguments of a correct call, and the expected sentence
DENSE = [
    ({"q": [1]}, "q is [1]; must be a tensor"),
    ({"q": None, "dropout": 0.1}, "q is None; must be a tensor"),
    ({"k": 3}, "k is 3; must be a tensor (B, T, H, D)"),
    ({"q": randn(2, 5, 4, 8, device="meta")}, "k is on cpu; q is on meta, and all inputs must be on one device"),
    ({"k": randn(2, 6, 2, 8, device="meta")}, "k is on meta; q is on cpu, and all inputs must be on one device"),
    ({"v": randn(2, 6, 2, 8, device="meta")}, "v is on meta; q is on cpu, and all inputs must be on one device"),
    ({"k": randn(2, 6, 2, 8).to_sparse()},
     "k is nested or sparse; must be dense, or all three jagged (attention and attention_with_lse take them)"),
    ({"q": randn(5, 4, 8)}, "q is (5, 4, 8); must have 4 axes (B, T, H, D)"),
    ({"v": randn(2, 6, 2, 8, 1)}, "v is (2, 6, 2, 8, 1); must have 4 axes (B, T, H, D)"),
    ({"k": randn(2, 6, 2, 8).half()}, "k is torch.float16; q is torch.float32, and q, k and v must share one dtype"),
    ({"v": randn(2, 6, 2, 8).bfloat16()},
     "v is torch.bfloat16; q is torch.float32, and q, k and v must share one dtype"),
    ({x: ints(1).expand(2, 5, 2, 8) for x in "qkv"},
     "q is torch.int64; must be float32, bfloat16 or float16 (float64 in the definition)"),
    ({"k": randn(2, 6, 2, 9)}, "k has head dim 9; q has 8, and they must agree"),
    ({"k": randn(1, 6, 2, 8)}, "k has batch 1; q has 2, and they must agree"),
    ({"v": randn(2, 5, 2, 8)}, "v is (2, 5, 2, 8); must be like k, (2, 6, 2, 8), in all but the last axis"),
    ({"v": randn(2, 6, 4, 8)}, "v is (2, 6, 4, 8); must be like k, (2, 6, 2, 8), in all but the last axis"),
    ({"v": randn(2, 6, 2, 0)}, "head dim is 8 for q and 0 for v; must be at least 1"),
    ({"k": randn(2, 6, 3, 8), "v": randn(2, 6, 3, 8)},
     "q has 4 heads and k has 3; k's must divide q's (each serves a group of query heads)"),
    ({"k": randn(2, 6, 8, 8), "v": randn(2, 6, 8, 8)},
     "q has 4 heads and k has 8; k's must divide q's (each serves a group of query heads)"),
    ({"k": randn(2, 6, 0, 8), "v": randn(2, 6, 0, 8)},
     "q has 4 heads and k has 0; k's must divide q's (each serves a group of query heads)"),
    ({"mask": True}, f"mask is True; must be a rooftile mask: {MASKS}"),
    ({"mask": "causal"}, f"mask is 'causal'; must be a rooftile mask: {MASKS}"),
    ({"mask": torch.ones(5, 6, dtype=torch.bool)},
     f"mask is a torch.bool tensor (5, 6); must be a rooftile mask: {MASKS}; write bias= for a tensor"),
    ({"scale": NAN}, "scale is nan; must be finite"),
    ({"scale": -math.inf}, "scale is -inf; must be finite"),
    ({"scale": "1"}, "scale is '1'; must be a number"),
    ({"scale": True}, "scale is True; must be a number"),
    ({"scale": torch.tensor(0.1)}, "scale is a torch.float32 tensor (); must be a number"),
    ({"softcap": -1.0}, "softcap is -1.0; must be finite and at least 0"),
    ({"softcap": NAN}, "softcap is nan; must be finite and at least 0"),
    ({"softcap": "30"}, "softcap is '30'; must be a number"),
    *(({"dropout": p}, f"dropout is {p!r}; must be a probability in [0, 1)")
      for p in (-0.1, 1.0, 2, NAN, "0.1", True, None)),
    ({"dropout": 0.1, "seed": 1.5}, "seed is 1.5; must be an int, or an int64 tensor of one element"),
    ({"seed": "7"}, "seed is '7'; must be an int, or an int64 tensor of one element"),
    ({"seed": True}, "seed is True; must be an int, or an int64 tensor of one element"),
    ({"dropout": 0.1, "seed": 2**63}, f"seed is {2**63}; must fit in 64 bits"),
    ({"seed": ints(1, 2)}, "seed is torch.int64 of 2 elements; must be an int, or an int64 tensor of one"),
    ({"seed": ints(1, dtype=torch.int32)},
     "seed is torch.int32 of 1 elements; must be an int, or an int64 tensor of one"),
    ({"deterministic": "yes"}, "deterministic is 'yes'; must be True, False, or None to follow torch"),
    ({"deterministic": 1}, "deterministic is 1; must be True, False, or None to follow torch"),
    ({"bias": randn(3, 5, 6)}, "bias is (3, 5, 6); must broadcast to (B, H, T, S), (2, 4, 5, 6)"),
    ({"bias": randn(2, 4, 5, 7)}, "bias is (2, 4, 5, 7); must broadcast to (B, H, T, S), (2, 4, 5, 6)"),
    ({"bias": randn(1, 2, 4, 5, 6)}, "bias is (1, 2, 4, 5, 6); must broadcast to (B, H, T, S), (2, 4, 5, 6)"),
    ({"bias": torch.ones(5, 6, dtype=torch.int64)},
     "bias is a torch.int64 tensor (5, 6); must be a floating-point tensor, or a boolean one: True where a key is seen"),
    ({"bias": torch.ones(5, 7, dtype=torch.bool)}, "bias is (5, 7); must broadcast to (B, H, T, S), (2, 4, 5, 6)"),
    ({"bias": 1.0}, "bias is 1.0; must be a floating-point tensor, or a boolean one: True where a key is seen"),
    ({"bias": randn(5, 6, device="meta")}, "bias is on meta; q is on cpu, and all inputs must be on one device"),
    ({"alibi": randn(3)}, "alibi is (3,); must be (H,) = (4,) or (B, H) = (2, 4)"),
    ({"alibi": ints(1, 2, 3, 4)},
     "alibi is a torch.int64 tensor (4,); must be a floating-point tensor (H,) = (4,) or (B, H) = (2, 4)"),
    ({"alibi": randn(4, device="meta")}, "alibi is on meta; q is on cpu, and all inputs must be on one device"),
    ({"alibi": randn(4, requires_grad=True)},
     "alibi requires a gradient and has none; pass alibi.detach(), or the slopes' effect as bias"),
    ({"sinks": randn(2, 4)}, "sinks is (2, 4); must be (H,) = (4,)"),
    ({"sinks": 0.5}, "sinks is 0.5; must be a floating-point tensor (H,) = (4,)"),
    ({"sinks": randn(4, device="meta")}, "sinks is on meta; q is on cpu, and all inputs must be on one device"),
    ({"backend": "cuda"}, f"backend is 'cuda'; has {', '.join(BACKENDS)}, or None for the fastest that runs"),
    ({"backend": ""}, f"backend is ''; has {', '.join(BACKENDS)}, or None for the fastest that runs"),
]  # fmt: skip

OFFSETS = "must be int32 or int64 of shape (B + 1,)"
PACKED = [
    ({"q": randn(1, 10, 4, 8)},
     "q must be a tensor (total, H, D) of sequences back to back; got a torch.float32 tensor (1, 10, 4, 8)"),
    ({"k": None}, "k must be a tensor (total, H, D) of sequences back to back; got None"),
    ({"v": randn(1, 12, 2, 8)}, "v is (1, 12, 2, 8); must have 3 axes (total, H, D)"),
    ({"v": randn(11, 2, 8)}, "v is (11, 2, 8); must be like k, (12, 2, 8), in all but the last axis"),
    ({"cu_q": [0, 3, 10]}, "cu_q is [0, 3, 10]; must be a tensor (B + 1,) of int32 or int64 offsets"),
    ({"cu_q": torch.tensor([0.0, 10.0])}, f"cu_q is torch.float32 (2,); {OFFSETS}"),
    ({"cu_k": ints([0, 8, 12])}, f"cu_k is torch.int64 (1, 3); {OFFSETS}"),
    ({"cu_k": ints()}, f"cu_k is torch.int64 (0,); {OFFSETS}"),
    ({"cu_q": ints(1, 3, 10)}, "cu_q starts at 1; must start at 0"),
    ({"cu_k": ints(-1, 8, 12)}, "cu_k starts at -1; must start at 0"),
    ({"cu_q": ints(0, 11, 10)}, "cu_q falls somewhere; must never fall: [0, 11, 10]"),
    ({"cu_q": ints(0, 3, 9)}, "cu_q ends at 9; must end at 10, the number of queries"),
    ({"cu_k": ints(0, 8, 13, dtype=torch.int32)}, "cu_k ends at 13; must end at 12, the number of keys"),
    ({"cu_q": ints(0, 10)}, "cu_q has 1 sequences and cu_k has 2; they must agree"),
    ({"bias": randn(10, 8)},
     "bias is (10, 8); must broadcast to (H, total_q, J), (4, 10, J >= the longest key sequence)"),
    ({"bias": randn(4, 9, 8)},
     "bias is (4, 9, 8); must broadcast to (H, total_q, J), (4, 10, J >= the longest key sequence)"),
    ({"bias": randn(4, 10, 7)}, "bias has 7 columns; the longest key sequence has 8 keys"),
    ({"alibi": randn(3, 4)}, "alibi is (3, 4); must be (H,) = (4,) or (B, H) = (2, 4)"),
]  # fmt: skip

PAIR = "must be a pair of tensors (o, lse), as attention_with_lse returns"
o, lse = randn(2, 5, 4, 8), randn(2, 4, 5)
MERGE = [
    ([], "merge got []; needs a list of at least one pair (o, lse)"),
    (o, "merge got a torch.float32 tensor (2, 5, 4, 8); needs a list of at least one pair (o, lse)"),
    (None, "merge got None; needs a list of at least one pair (o, lse)"),
    ((o, lse), f"merge: part 0 {PAIR}"),
    ([(o, lse), (o,)], f"merge: part 1 {PAIR}"),
    ([(o, lse), 3], f"merge: part 1 {PAIR}"),
    ([(o, lse), (o, 1.0)], f"merge: part 1 {PAIR}"),
    ([(o.int(), lse)], f"merge: part 0 {PAIR}"),
    ([(o, lse), (o[:1], lse[:1])], "merge: o of part 1 is (1, 5, 4, 8); part 0 has (2, 5, 4, 8)"),
    ([(o, lse.mT)], "merge: lse of part 0 is (2, 5, 4); o is (2, 5, 4, 8), so it must be (2, 4, 5)"),
    ([(o[0], lse[0].mT)], "merge: lse of part 0 is (5, 4); o is (5, 4, 8), so it must be (4, 5)"),
    ([(o, lse), (o.to("meta"), lse.to("meta"))], "merge: part 1 is on meta and meta; part 0 is on cpu"),
]


def name_of(value: Any) -> str | None:
    return None if isinstance(value, str) else "-".join(value) if isinstance(value, dict) else type(value).__name__


@pytest.mark.parametrize(("changed", "message"), DENSE, ids=name_of)
def test_dense(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(rt.InvalidInput) as raised:
        dense(**changed)
    assert str(raised.value) == message


@pytest.mark.parametrize(("changed", "message"), PACKED, ids=name_of)
def test_packed(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(rt.InvalidInput) as raised:
        packed(**changed)
    assert str(raised.value) == message


@pytest.mark.parametrize(("parts", "message"), MERGE, ids=name_of)
def test_merge(parts: Any, message: str) -> None:
    with pytest.raises(rt.InvalidInput) as raised:
        rt.merge(parts)
    assert str(raised.value) == message


@pytest.mark.parametrize("seed", [np.int64(3), np.int32(3), ints(3)], ids=repr)
def test_a_seed_of_numpy_or_a_tensor(seed: Any) -> None:
    q = randn(2, 5, 4, 8)
    due = rt.attention(q, q, q, dropout=0.4, seed=3)
    assert torch.equal(rt.attention(q, q, q, dropout=np.float32(0.4).item(), seed=seed), due)


def test_scales_of_numpy() -> None:
    q = randn(2, 5, 4, 8)
    found = rt.attention(q, q, q, rt.Window(np.int64(3)), scale=np.float64(0.25), softcap=np.int64(4))
    assert torch.equal(found, rt.attention(q, q, q, rt.Window(3), scale=0.25, softcap=4))


def test_heads_that_do_not_divide_may_be_lengths() -> None:
    q, k = randn(2, 8, 20, 16), randn(2, 4, 13, 16)
    with pytest.raises(rt.InvalidInput) as raised:
        rt.attention(q, k, k)
    due = "q has 20 heads and k has 13; k's must divide q's (each serves a group of query heads); "
    assert str(raised.value) == due + "if they are (B, H, T, D), write x.transpose(1, 2) for each"


@pytest.mark.parametrize(("q", "k"), [((2, 8, 64, 32), (2, 2, 64, 32)), ((1, 12, 256, 8), (1, 12, 256, 8))], ids=str)
def test_axes_that_look_swapped_are_named(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    wrong = randn(*q), randn(*k), randn(*k)
    with pytest.warns(SwappedAxes, match=r"if they are \(B, H, T, D\), write x\.transpose\(1, 2\)") as caught:
        rt.attention(*wrong)
    assert caught[0].filename == __file__
    # the line that the warning tells its reader to write
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SwappedAxes)
        rt.attention(*wrong)
    rt.attention(*(x.transpose(1, 2) for x in wrong))


@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((1, 1, 64, 8), (1, 90, 64, 8)), ((1, 5, 64, 8), (1, 5, 8, 8)), ((2, 7, 128, 8), (2, 7, 128, 8)),
        ((1, 0, 200, 8), (1, 0, 200, 8)),
    ],
)  # fmt: skip
def test_a_short_text_of_many_heads_is_no_mistake(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rt.attention(randn(*q), randn(*k), randn(*k)).shape == q


def test_explain_begins_with_sizes() -> None:
    q, k, v = randn(2, 70, 8, 32), randn(2, 90, 4, 32), randn(2, 90, 4, 16)
    assert rt.explain(q, k, v).splitlines()[0] == "sizes    B 2  T 70  S 90  H 8/4  D 32/16"
    assert rt.explain(q, q, q).splitlines()[0] == "sizes    B 2  T 70  S 70  H 8/8  D 32"


def test_a_mistake_is_a_value_error_and_a_missing_feature_is_not() -> None:
    assert issubclass(rt.InvalidInput, ValueError)
    assert issubclass(rt.Unsupported, NotImplementedError)


def test_explain_checks_what_attention_checks() -> None:
    q, k = randn(2, 5, 4, 8), randn(2, 6, 3, 8)
    for changed, message in (
        ({}, "q has 4 heads and k has 3; k's must divide q's (each serves a group of query heads)"),
        ({"q": "q"}, "q is 'q'; must be a tensor"),
        ({"k": q, "v": q, "dropout": 1.5}, "dropout is 1.5; must be a probability in [0, 1)"),
    ):
        with pytest.raises(rt.InvalidInput) as raised:
            rt.explain(**{"q": q, "k": k, "v": k} | changed)
        assert str(raised.value) == message


def test_nothing_runs_before_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile.exact.backends import eager

    def run(*args: Any) -> None:
        raise AssertionError("a kernel ran on bad input")

    monkeypatch.setattr(eager, "attend", run)
    with pytest.raises(rt.InvalidInput):
        dense(bias=randn(7), backend="eager")
    with pytest.raises(AssertionError, match="a kernel ran"):
        dense(backend="eager")


@pytest.mark.parametrize(
    "right",
    [
        {"seed": torch.tensor(3), "dropout": 0.1},
        {"seed": -(2**63), "dropout": 0.1},
        {"bias": torch.tensor(1.0)},
        {"bias": randn(6)},
        {"bias": randn(4, 1, 6)},
        {"alibi": randn(2, 4)},
        {"alibi": randn(4).bfloat16()},
        {"sinks": randn(4)},
        {"scale": 2, "softcap": None},
        {"deterministic": True},
        {"v": randn(2, 6, 2, 3)},
    ],
    ids=name_of,
)
def test_what_is_right_passes(right: dict[str, Any]) -> None:
    assert dense(**right).isfinite().all()


def test_packed_offsets_may_be_of_either_integer_and_may_hold_empty_sequences() -> None:
    due = packed()
    cu_q, cu_k = (ints(0, 3, 3, 10, dtype=torch.int32), ints(0, 8, 8, 12, dtype=torch.int32))
    assert torch.equal(packed(cu_q=cu_q, cu_k=cu_k, q=randn(10, 4, 8)).isfinite(), due.isfinite())
    assert packed(bias=randn(1, 1, 20), validate=True).shape == (10, 4, 8)
    nothing = {"q": randn(0, 4, 8), "k": randn(0, 2, 8), "v": randn(0, 2, 8), "cu_q": ints(0), "cu_k": ints(0)}
    assert packed(**nothing).shape == (0, 4, 8)


@pytest.mark.parametrize("case", tagged("conformance"), ids=lambda case: case.name)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_call_on_a_case_has_the_cases_spec(case: Case, needs_grad: bool) -> None:
    (q, k, v, *cu), mask, options = case.inputs(requires_grad=needs_grad)
    given = {name: options.pop(name) for name in ("bias", "alibi", "sinks") if name in options}
    named = Options(**given, **dict(zip(("cu_q", "cu_k"), cu, strict=bool(cu))))
    options.pop("seed", None)
    code = spec_code(q, k, v, mask, named, CallSettings(deterministic=False, **options))
    assert decode(code) == case.problem(needs_grad=needs_grad).spec


def test_a_spec_survives_the_crossing_as_a_string() -> None:
    for case in CASES.values():
        for device in ("cpu", "sm90"):
            spec = case.problem(device, needs_lse=bool(case.lengths)).spec
            assert decode(spec.code) == spec
            assert decode(spec.code).code == spec.code


def test_numbers_may_be_numpys() -> None:
    q, k, v = (torch.randn(1, 5, 2, 16) for _ in range(3))
    due = rt.attention(q, k, v, rt.CAUSAL, scale=0.25, softcap=3.0)
    for kind in (np.float32, np.float64, np.float16):
        assert torch.equal(rt.attention(q, k, v, rt.CAUSAL, scale=kind(0.25), softcap=kind(3)), due)
    assert torch.equal(rt.attention(q, k, v, rt.CAUSAL, scale=0.25, softcap=np.int64(3)), due)
    with pytest.raises(rt.InvalidInput, match="must be a number"):
        rt.attention(q, k, v, scale=np.True_)
