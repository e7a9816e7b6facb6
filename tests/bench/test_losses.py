"""`rooftile accuracy --methods`: a needle is found where a method sees all keys, and errors are what they are said to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rooftile as rt
from rooftile import approximate as ap
from rooftile.cli import main
from rooftile.errors import InvalidInput
from rooftile_lab.bench.methods import losses
from rooftile_lab.bench.methods.losses import DEPTHS, Loss, attend_exactly, error_of, needle, with_needle
from rooftile_lab.bench.methods.native_sparse import NativeSparse
from rooftile_lab.bench.methods.table import WAYS, WHOLE
from rooftile_lab.bench.methods.way import Sizes, drawn
from rooftile_lab.bench.methods.ways import Linformer, Loki, Reformer, Routing, SparseTransformer

CPU = torch.device("cpu")
SIZES = Sizes(1, 160, 4, 2, 32)
# settings in which a method leaves nothing out
EXACT = (
    Linformer(name="linformer", r=160),
    SparseTransformer(name="strided", pattern="strided", stride=160),
    SparseTransformer(name="fixed", pattern="fixed", stride=160),
    Reformer(name="reformer", chunk=160, rounds=1),
    Routing(name="routing", clusters=1),
    Loki(name="loki", keep=1.0),
)


def test_a_needle_has_the_largest_score_of_the_last_query_and_of_no_other_key() -> None:
    q, k, _ = with_needle(SIZES, 40, CPU, torch.float32)
    scores = torch.einsum("hd,shd->hs", q[0, -1], k[0].repeat_interleave(2, 1)) / 32**0.5
    assert (scores.argmax(-1) == 40).all()
    torch.testing.assert_close(scores[:, 40], torch.full((4,), losses.SHARPNESS))
    others = scores[:, torch.arange(160) != 40]
    assert others.std() < 1.3 * losses.SHARPNESS / 32**0.5
    # the heads of a group ask alike, and all queries before are the keys
    torch.testing.assert_close(q[0, :-1, ::2], k[0, :-1])
    torch.testing.assert_close(q[0, :-1, 1::2], k[0, :-1])


def test_exact_attention_finds_the_needle_at_every_depth() -> None:
    assert needle(attend_exactly, SIZES, CPU, torch.float32) == (1.0,) * DEPTHS
    assert needle(attend_exactly, SIZES, CPU, torch.bfloat16) == (1.0,) * DEPTHS


@pytest.mark.parametrize("way", EXACT, ids=lambda way: way.name)
def test_a_method_that_leaves_nothing_out_finds_the_needle_and_has_no_error(way) -> None:
    assert needle(losses.way_of(way), SIZES, CPU, torch.float32) == (1.0,) * DEPTHS
    assert error_of(way, *drawn(SIZES, CPU, torch.float32)) < 1e-5


def test_native_sparse_attention_finds_the_needle_with_all_blocks_chosen() -> None:
    """Its other branches add a third each of what they see, so its error is not that of exact attention."""
    assert needle(losses.way_of(NativeSparse(name="nsa", count=3)), SIZES, CPU, torch.float32) == (1.0,) * DEPTHS


def test_a_method_finds_the_needle_where_it_looks_and_nowhere_else() -> None:
    near = SparseTransformer(name="near", pattern="fixed", stride=80)
    found = needle(losses.way_of(near), SIZES, CPU, torch.float32)
    # the own block of 80 begins at 80, and the fifth needle lies at 72, which begins the summary of the block before
    assert found == (0.0,) * 4 + (1.0,) * 6
    assert needle(lambda q, k, v: torch.zeros_like(q), SIZES, CPU, torch.float32) == (0.0,) * DEPTHS
    assert needle(lambda q, k, v: q * torch.nan, SIZES, CPU, torch.float32) == (0.0,) * DEPTHS
    assert Loss(method="m", found=found).recall == 0.6


def test_an_error_is_relative_to_the_attention_that_the_method_stands_for() -> None:
    q, k, v = drawn(Sizes(1, 64, 2, 2, 16), CPU, torch.float32)
    due = rt.attention(q, k, v, rt.CAUSAL)
    o = ap.linear(q, k, v, rt.CAUSAL)
    assert error_of(WAYS["linear"], q, k, v) == pytest.approx(((o - due).norm() / due.norm()).item(), rel=1e-4)
    # Routing stands for attention of the normed queries and keys, Linformer for attention without a mask
    normed = [torch.nn.functional.layer_norm(x, (16,)) for x in (q, k)]
    torch.testing.assert_close(WAYS["routing"].target(q, k, v), rt.attention(*normed, v, rt.CAUSAL), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(WAYS["linformer"].target(q, k, v), rt.attention(q, k, v))


def test_the_command_prints_every_method_and_ones_own_tensors(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(losses, "WHOLE", ("linear", "strided", "loki"))
    q, k, v = drawn(Sizes(1, 130, 4, 2, 32), CPU, torch.float32)
    torch.save({"q": q, "k": k, "v": v}, tmp_path / "mine.pt")
    words = ["accuracy", "--methods", "--length", "64", "--heads", "1", "--dim", "32", "--draws", "1", "--dtype", "fp32"]
    words += ["--tensors", str(tmp_path / "mine.pt"), "--device", "cpu"]
    assert code_of([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["what"] == "64 tokens, 1 heads of 32, fp32"
    rows = {row["method"]: row for row in found["methods"]}
    assert list(rows) == ["exact", "linear", "strided", "loki"]
    assert rows["exact"]["recall"] == 1
    assert rows["exact"]["gaussian"] < 1e-6
    assert rows["strided"]["own"] == pytest.approx(error_of(WAYS["strided"], q, k, v))
    # a stride of 128 is longer than the text
    assert rows["strided"]["gaussian"] < 1e-5 < rows["strided"]["own"]
    assert code_of(words) == 0
    told = capsys.readouterr().out
    assert "error, mine.pt" in told
    for name in rows:
        assert f"\n{name} " in told


def code_of(words: list[str]) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as done:
        main(words)
    return int(done.value.code or 0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--distribution", "sink"], "--distribution is for FP8 and INT8; --methods has Gaussian tensors, a needle"),
        (["--mask", "causal"], "--mask is for FP8 and INT8; --methods has Gaussian tensors"),
        (["--length", "63"], "the texts have 63 tokens; a needle at ten depths needs at least 64"),
        (["--tensors", "nowhere.pt"], "--tensors is nowhere.pt, which is no file"),
        (["--tensors", "two.pt"], "the tensors are q (1, 70, 3, 16), k (1, 70, 2, 16), v (1, 70, 2, 16); must be q (B, T, H, D)"),
        (["--tensors", "short.pt"], "the tensors have 8 tokens; at least 64 are due, as methods skip distant ones"),
    ],
)
def test_a_users_mistake_is_one_sentence(words, sentence, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    k = torch.zeros(1, 70, 2, 16)
    torch.save({"q": torch.zeros(1, 70, 3, 16), "k": k, "v": k}, "two.pt")
    torch.save({"q": k[:, :8], "k": k[:, :8], "v": k[:, :8]}, "short.pt")
    assert code_of(["accuracy", "--methods", "--device", "cpu", *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_method_that_refuses_ones_tensors_says_why_and_the_others_go_on(monkeypatch) -> None:
    own = drawn(Sizes(1, 64, 2, 2, 16), CPU, torch.float32)
    ways = [Routing(name="routing", clusters=0), WAYS["linear"]]
    monkeypatch.setattr(losses, "error_of", lambda way, q, k, v: _refuses() if way.name == "routing" and q is own[0] else 0.5)
    monkeypatch.setattr(losses, "needle", lambda *_: (1.0,))
    exact, routing, linear = losses.losses(Sizes(1, 64, 2, 2, 16), CPU, torch.float32, ways=ways, own=own, draws=1)
    assert (routing.own, routing.reason) == (None, "centroids is empty")
    assert linear.own == 0.5
    assert exact.own is not None


def _refuses() -> float:
    raise InvalidInput("centroids is empty")


def test_all_methods_are_measured_by_default() -> None:
    assert losses.WHOLE == WHOLE
