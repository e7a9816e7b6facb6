"""Experiments on real operators: what they run, what they leave, and their parts. Their answers: test_known_answers.py."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftile.diagnosis.experiments import measure
from rooftile.diagnosis.experiments.call import RepeatableCall, held_bytes
from rooftile.diagnosis.experiments.deadline import Deadline
from rooftile.diagnosis.experiments.in_cache.slices import packed, same_pages
from rooftile.diagnosis.experiments.intensity import ladder, references
from rooftile.diagnosis.experiments.intensity.multiply_adds import expected
from rooftile.diagnosis.experiments.intensity.references import References
from rooftile.diagnosis.experiments.intensity.sweep import Sweep
from rooftile.diagnosis.experiments.measure import alone, with_intensity
from rooftile.diagnosis.experiments.smaller.axes import axes, piece
from rooftile.diagnosis.experiments.smaller.fixed import fixed_us, smaller
from rooftile.diagnosis.experiments.smaller.rules import CHECK_SIZES, RULES
from rooftile.diagnosis.experiments.timing import HostTimer, error, interleaved
from rooftile.errors import Unsupported
from rooftile.exact.masks import CAUSAL
from rooftile.exact.spec import Spec
from tests.diagnosis.operators import sample

aten = torch.ops.aten


@cache
def clock() -> HostTimer:
    """One for all tests, and none where they are only collected: it fills an array larger than the caches."""
    return HostTimer()


def test_a_table_is_cut_to_the_rows_that_are_read() -> None:
    table, rows = torch.randn(1000, 8), torch.tensor([[7, 900], [7, 3]])
    near = packed(RepeatableCall(aten.embedding.default, (table, rows)))
    assert near.tensors[0].shape == (3, 8)
    assert torch.equal(near.run(), table[rows])


def test_pages_in_the_cache_are_few_and_the_rest_is_as_it_was() -> None:
    pages = torch.randn(2, 64, 16, 2, 32)
    q, table, lengths = torch.randn(3, 1, 4, 32), torch.randperm(64)[:60].int().view(3, 20), torch.full((3,), 320).int()
    spec = Spec(dtype=q.dtype, dim=32, dim_v=32, group=2, mask=CAUSAL, scale=0.2, layout="paged", queries="one", device="cpu")
    call = RepeatableCall(
        torch.ops.rooftile.attention_paged.default, (q, *pages, table, lengths, None, None, None, [], spec.code, "eager")
    )
    timer = HostTimer()
    timer.cache_bytes = 5 * 2 * pages[0, 0].nbytes
    near = same_pages(call, timer)
    assert set(near.tensors[3].flatten().tolist()) == set(range(5))
    kept = [n for n in range(len(call.tensors)) if n != 3]
    assert all(near.tensors[n].data_ptr() == call.tensors[n].data_ptr() for n in kept)
    assert near.run()[0].shape == q.shape


def test_the_named_operators_exist() -> None:
    there = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert CHECK_SIZES | RULES.keys() <= there


# E4


def test_references_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slopes = iter([0.25, 1.0])
    monkeypatch.setattr(references, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(references, "_MEASURED", {})
    monkeypatch.setattr(references, "_slope", lambda *args: next(slopes))
    first = references.references(torch.float32, clock(), torch.device("cpu"))
    monkeypatch.setattr(references, "_MEASURED", {})
    assert references.references(torch.float32, clock(), torch.device("cpu")) == first == References(0.25, 1.0)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_references_on_a_busy_machine_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(references, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(references, "_MEASURED", {})
    monkeypatch.setattr(references, "_slope", lambda *args: 0.9)
    with pytest.raises(Unsupported, match=r"an addition has slope 0.90 here and 256 multiply-adds 0.90, which are no scale"):
        references.references(torch.float32, clock(), torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [3, 48])
def test_added_multiply_adds_are_computed(dtype: torch.dtype, count: int) -> None:
    x = torch.randn(37, 65).to(dtype)
    made = ladder.Ladder(RepeatableCall(aten.mul.Tensor, (x, 2.0))).rung(count).run()[0]
    near = 0.01 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(made.double(), expected(x * 2, count), atol=near, rtol=near)
    # numbers near 1 would look computed without any
    assert (made.double() - (x * 2).double()).abs().max() > 0.1


def test_a_rung_in_place_writes_where_the_operator_does_and_is_undone() -> None:
    x = torch.randn(129)
    before = x.clone()
    call = RepeatableCall(aten.add_.Tensor, (x, 1.0))
    rung = ladder.Ladder(call).rung(3)
    rung.restore()
    rung.run()
    torch.testing.assert_close(x.double(), expected(before + 1.0, 3), atol=1e-5, rtol=0)
    rung.restore()
    assert torch.equal(x, before)


def test_a_reduction_multiplies_what_it_reads() -> None:
    x = torch.randn(33, 70)
    made = ladder.Ladder(RepeatableCall(aten.sum.dim_IntList, (x, [1]))).rung(3).run()[0]
    torch.testing.assert_close(made.double(), expected(x, 3).sum(1), atol=1e-4, rtol=0)


def test_what_has_no_ladder_says_why() -> None:
    with pytest.raises(Unsupported, match="no floating-point numbers"):
        ladder.Ladder(RepeatableCall(aten.add.Tensor, (torch.arange(9), 1)))
    with pytest.raises(Unsupported, match="Inductor calls a library"):
        ladder.Ladder(RepeatableCall(aten.cumsum.default, (torch.randn(9, 4).sort().values.unsqueeze(0), 0))).rung(1)


def test_without_a_compiler_the_intensity_says_so_and_the_others_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args, **kwargs):
        raise RuntimeError("No C++ compiler was found")

    monkeypatch.setattr(torch, "compile", absent)
    monkeypatch.setattr(ladder, "_COMPILED", {})
    monkeypatch.setattr(references, "_MEASURED", {})
    monkeypatch.setattr(references, "_path", lambda *args: Path("/nonexistent/references.json"))
    given = sample(aten.sub.Tensor, torch.randn(1 << 18), 1.5)
    found = with_intensity(alone(given, clock(), 0.5), given, clock(), Deadline(60.0))
    assert "cannot be compiled here: No C++ compiler was found" in found.why_not["intensity"]
    assert found.slope is None
    assert found.gain is not None
    assert found.fixed_us is not None


# the parts


def test_the_simulated_sweep_has_its_slope_and_knee() -> None:
    added = (0.0, 12.5, 25.0, 50.0, 100.0, 200.0, 400.0)
    memory = Sweep(added, tuple(max(100.0, 20.0 + a) for a in added), 1.0, tuple(a * 1e3 for a in added))
    assert memory.slope == 0
    assert memory.knee_flops() == pytest.approx(80e3)
    compute = Sweep(added, tuple(100.0 + a for a in added), 1.0, tuple(a * 1e3 for a in added))
    assert compute.slope == pytest.approx(1)
    assert compute.knee_flops() == 0
    assert Sweep((0.0, 400.0), (100.0, 500.0), 1.0, (0.0, 1.0)).slope == pytest.approx(1)
    assert Sweep((0.0,), (100.0,), 1.0, (0.0,)).slope is None
    assert References(addition=0.2, multiply_adds=1.0).read(0.2) == 0


@pytest.mark.parametrize("fixed", [0.0, 3.0, 80.0])
def test_the_fixed_part_of_a_line_is_found(fixed: float) -> None:
    shares = [1.0, 0.5, 0.25, 1 / 16, 1 / 64]
    times = [fixed + 100 * share for share in shares]
    assert fixed_us(shares, times) == pytest.approx(fixed, abs=1e-9)
    assert fixed_us([1.0], [7.0]) == 7.0


def test_axes_of_products_convolutions_and_gathers() -> None:
    def sizes(function, *args) -> list[int]:
        return [axis.size for axis in axes(RepeatableCall(function, args))]

    rand = torch.randn
    assert sizes(aten.mm.default, rand(3, 5), rand(5, 7)) == [3, 7, 5]
    assert sizes(aten.addmm.default, rand(7), rand(3, 5), rand(5, 7)) == [3, 7, 5]
    assert sizes(aten.addmm.default, rand(3, 7), rand(3, 5), rand(5, 7)) == [3, 7, 5]
    # a table with as many rows as indices keeps them
    call = RepeatableCall(aten.embedding.default, (rand(9, 4), torch.randint(0, 9, (9,))))
    assert [axis.places for axis in axes(call)] == [((1, 0),)]
    image = (rand(2, 6, 8, 8), rand(4, 6, 3, 3), rand(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert sizes(aten.convolution.default, *image) == [2, 4]
    assert sizes(aten.native_layer_norm.default, rand(6, 10), [10], rand(10), rand(10), 1e-5) == [6]
    assert sizes(aten.add.Tensor, rand(6, 10), rand(10)) == [6, 10]
    assert sizes(aten.arange.default, 5) == []


def test_axes_of_attention_with_a_bias_and_of_a_single_query() -> None:
    def places(*t: torch.Tensor) -> list[Any]:
        return [
            (axis.size, axis.places) for axis in axes(RepeatableCall(aten._scaled_dot_product_efficient_attention.default, t))
        ]

    q, one, k = torch.randn(2, 6, 5, 8), torch.randn(2, 6, 1, 8), torch.randn(2, 6, 9, 8)
    # a bias for all heads stays whole when heads are cut
    assert places(q, k, k, torch.randn(2, 1, 5, 9)) == [
        (2, ((0, 0), (1, 0), (2, 0), (3, 0))), (6, ((0, 1), (1, 1), (2, 1))),
    ]  # fmt: skip
    # fewer key heads than heads: only the keys can be cut
    assert places(one[:1], k[:1, :3], k[:1, :3]) == [(9, ((1, 2), (2, 2)))]
    assert places(q, k, k, torch.randn(5, 9)) == []


def test_a_size_among_the_arguments_is_cut_with_its_tensor() -> None:
    x, weight = torch.randn(6, 8, 5), torch.randn(8)
    out, mean, rstd = aten.native_group_norm.default(x, weight, weight, 6, 8, 5, 2, 1e-5)
    forward = RepeatableCall(aten.native_group_norm.default, (x, weight, weight, 6, 8, 5, 2, 1e-5))
    args = (torch.ones_like(out), x, mean, rstd, weight, 6, 8, 5, 2, [True, True, True])
    backward = RepeatableCall(aten.native_group_norm_backward.default, args)
    for call in (forward, backward):
        (axis,) = axes(call)
        small = axis.cut(call, 2).run()
        assert len(small[0]) == 2
        torch.testing.assert_close(small[0], call.run()[0][:2])


@pytest.mark.parametrize("overlapping", [False, True])
def test_the_axes_of_pooling_are_images_and_channels(overlapping: bool) -> None:
    x, size = torch.randn(3, 4, 8, 8), [3, 3] if overlapping else [2, 2]
    stride, padding = ([1, 1], [1, 1]) if overlapping else ([2, 2], [0, 0])
    rest = (size, stride, padding, False, True, None)
    forward = RepeatableCall(aten.avg_pool2d.default, (x, *rest))
    backward = RepeatableCall(aten.avg_pool2d_backward.default, (forward.run(), x, *rest))
    upsample = RepeatableCall(aten.upsample_nearest2d.default, (x, [16, 16], None, None))
    for call in (forward, backward, upsample):
        found = axes(call)[:2]
        assert [axis.size for axis in found] == [3, 4]
        for axis in found:
            axis.cut(call, 2).run()


def test_a_slice_that_is_another_program_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "cached_share", lambda *unused, **named: 2.4)
    found = alone(sample(aten.add.Tensor, torch.ones(1 << 20), 1.0), HostTimer(), 0.2)
    assert found.gain is found.cached_us is None
    assert "take 2.4 times as long as the whole" in found.why_not["cache"]


def test_axes_of_a_recurrent_layer_are_time_and_batch() -> None:
    x, state, weight = torch.randn(7, 3, 4), torch.randn(2, 3, 5), torch.randn(20, 4)
    rule = RULES["_cudnn_rnn"]
    assert rule([x, weight, weight, state, state]) == [((0, 0),), ((0, 1), (3, 1), (4, 1))]
    # the batch comes first
    assert rule([x.transpose(0, 1), weight, weight, state, state]) == []


def test_lists_are_cut_to_some_of_their_tensors() -> None:
    sizes = (600, 300, 90, 10)
    weights, other = ([torch.full((n, 2), float(n)) for n in sizes] for _ in range(2))
    call = RepeatableCall(aten._foreach_addcmul_.Scalar, (weights, other, other, 2.0))
    (axis,) = axes(call)
    for share, left in ((0.7, [600, 90, 10]), (0.05, [10]), (0.002, [2]), (0.0, [1])):
        made = piece(call, [axis], share)
        assert [len(x) for x in made.call.args[0]] == [len(x) for x in made.call.args[2]] == left
        assert made.share == pytest.approx(sum(left) / 1000)
        made.call.run()
    # numbers beside the tensors are cut alike, and a counter of steps is there for each
    steps = [torch.tensor(float(n)) for n in sizes]
    made = piece(RepeatableCall(aten._foreach_addcdiv_.ScalarList, (weights, other, other, [1.0, 2.0, 3.0, 4.0])), [axis], 0.05)
    assert made.call.args[3] == [4.0]
    args = (weights, other, other, other, [], steps)
    named = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    made = piece(RepeatableCall(aten._fused_adamw_.default, args, named), [axis], 0.002)
    assert [tuple(x.shape) for x in made.call.tensors] == [(2, 2)] * 4 + [()]
    made.call.run()


@pytest.mark.parametrize("share", [0.5, 0.1, 0.0])
def test_a_piece_runs_and_knows_its_share(share: float) -> None:
    for function, args in (
        (aten.mm.default, (torch.randn(65, 33), torch.randn(33, 129))),
        (aten.add.Tensor, (torch.randn(4, 1, 77), torch.randn(9, 1))),
        (aten.native_layer_norm.default, (torch.randn(6, 10), [10], None, None, 1e-5)),
    ):
        made = piece(RepeatableCall(function, args), axes(RepeatableCall(function, args)), share)
        made.call.run()
        assert made.share <= 0.75
        whole, part = (math.prod(x.shape[0] for x in call.tensors) for call in (RepeatableCall(function, args), made.call))
        assert part < whole or share == 0.5


@pytest.mark.parametrize(
    ("function", "args", "out"),
    [(aten.mm.out, (torch.randn(64, 32), torch.randn(32, 96)), (64, 96)),
     (aten.addmm.out, (torch.randn(96), torch.randn(64, 32), torch.randn(32, 96)), (64, 96)),
     (aten.bmm.out, (torch.randn(3, 64, 32), torch.randn(3, 32, 96)), (3, 64, 96))],
    ids=["mm", "addmm", "bmm"],
)  # fmt: skip
def test_a_result_that_is_given_is_cut_and_grown_too(function, args, out) -> None:
    """A compiled program calls products so; a result of another size would be resized, with a warning."""
    result = torch.empty(out)
    given = sample(function, *args, out=result)
    found = alone(given, clock(), 0.4)
    assert result.shape == out
    assert {"cache", "size"}.isdisjoint(found.why_not)
    made = piece(RepeatableCall.of(given), axes(RepeatableCall.of(given)), 0.1).call
    assert made.run().shape == made.kwargs["out"].shape
    assert made.run().numel() < result.numel()


def test_what_cannot_be_cut_says_so() -> None:
    with pytest.raises(Unsupported, match="none of its dimensions"):
        smaller(RepeatableCall(aten.arange.default, (5,)), [])


def test_expanded_tensors_hold_what_they_hold() -> None:
    assert held_bytes(torch.randn(5, 1).expand(5, 100)) == 20
    assert held_bytes(torch.randn(5, 100)) == 2000


def test_samples_take_turns_until_the_budget_ends() -> None:
    seen: list[str] = []
    taken = interleaved({"a": lambda: seen.append("a") or 1.0, "b": lambda: seen.append("b") or 1.0}, 5.0)
    assert seen[:4] == ["a", "b", "b", "a"]
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 5, "b": 5}
    uneven = iter(range(1, 1000))
    assert len(interleaved({"a": lambda: float(next(uneven))}, 5.0)["a"]) == 30
    assert len(interleaved({"a": lambda: float(next(uneven))}, -1.0)["a"]) == 3
    assert error([1.0, 1.0, 1.0]) == 0 < error([1.0, 2.0, 3.0])


# after an experiment all is as before


def test_arguments_random_numbers_dtype_and_threads_are_as_before() -> None:
    x = torch.randn(5000)
    before, state, threads = x.clone(), torch.get_rng_state(), torch.get_num_threads()
    alone(sample(aten.mul_.Tensor, x, 0.5), clock(), 0.2)
    alone(sample(aten.native_dropout.default, x, 0.5, True), clock(), 0.2)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32


def test_a_call_that_fails_in_an_experiment_leaves_the_arguments() -> None:
    x = torch.randn(64)
    before, seen = x.clone(), []

    def breaks_later(y: torch.Tensor) -> torch.Tensor:
        seen.append(y)
        if len(seen) > 6:
            raise KeyboardInterrupt
        return y.mul_(2.0)

    with pytest.raises(KeyboardInterrupt):
        alone(sample(breaks_later, x), clock(), 0.2)
    assert torch.equal(x, before)


def test_inference_tensors_and_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(500)
        found = alone(sample(aten.mul_.Tensor, x, 0.5), clock(), 0.2)
    assert found.fixed_us is not None
