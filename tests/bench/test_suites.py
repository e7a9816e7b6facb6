"""The suites of `rooftile bench`: each yields rows whose numbers follow from what was timed and counted."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rooftile as rt
from rooftile.cost import counts, flops, memory_roof, roof, session, traffic
from rooftile.cost.io import Traffic
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.cases import CASES
from rooftile.hardware import ceilings, clock, profiler
from rooftile_lab.bench import results, rows
from rooftile_lab.bench.suites import SUITES, cache, cpu, deterministic, overhead, packed, paged, precision
from tests.bench.session import CEILINGS, SESSION

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"


def quiet(words: str) -> None:
    """No progress."""


# the lines


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_published_line_is_a_row_as_rows_are_written(path: Path) -> None:
    for line, row in zip(path.read_text().splitlines(), results.read(path), strict=True):
        assert row.json() == line
        assert row.median_us is not None or row.reason or row.measures
        assert row.case
        assert row.backend
        assert row.commit


def test_a_field_that_does_not_apply_is_absent_and_a_zero_is_not() -> None:
    row = rows.timed_row(SESSION, [], suite="s", case="c", backend="b", phase="fwd", error=0.0, reason="refused: no")
    line = json.loads(row.json())
    assert list(line)[:6] == ["suite", "case", "backend", "phase", "error", "reason"]
    assert line["error"] == 0.0
    assert not {"median_us", "tflops", "measures", "ran", "samples"} & set(line)


def test_low_and_high_are_quartiles_and_of_few_runs_the_least_and_the_most() -> None:
    assert rows.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert rows.spread([3.0, 1.0]) == (1.0, 2.0, 3.0)
    assert rows.measured({"a_us": [1.0, 3.0], "b_us": []}) == {
        "low": {"a_us": 1.0}, "measures": {"a_us": 2.0}, "high": {"a_us": 3.0}
    }  # fmt: skip


def test_a_row_s_rates_follow_from_its_median_and_its_floor() -> None:
    problem = CASES["causal"].problem()
    row = rows.timed_row(
        SESSION, [100.0, 200.0, 300.0, 400.0, 500.0], dtype="fp32", roof=roof(problem, CEILINGS), suite="s", case="c",
        backend="b", phase="fwd",
    )  # fmt: skip
    assert (row.median_us, row.samples) == (300.0, 5)
    assert row.tflops == pytest.approx(flops.count(problem) / 300e6, rel=1e-5)
    only_bytes = rows.timed_row(
        SESSION, [2.0], roof=memory_roof(traffic.copy(5000), CEILINGS), suite="s", case="c", backend="b", phase="fwd"
    )
    assert (only_bytes.tflops, only_bytes.gbs, only_bytes.roofline_percent, only_bytes.binds) == (None, 5.0, 50.0, "memory")


def test_a_time_below_its_roof_measures_the_ceilings_again_once_and_the_higher_count(monkeypatch) -> None:
    measured = []

    def measure(device, *, refresh):
        measured.append(refresh)
        return replace(CEILINGS, copy_gbs=4 * CEILINGS.copy_gbs, matmul_tflops={"fp32": 1e-6})

    monkeypatch.setattr(ceilings, "measure", measure)
    run = replace(SESSION, again=None)
    floor = memory_roof(traffic.copy(5000), CEILINGS, "fp32")
    named = {"dtype": "fp32", "roof": floor, "suite": "s", "case": "c", "backend": "b", "phase": "fwd"}
    assert rows.timed_row(run, [2 * floor.time_us], **named).roofline_percent == pytest.approx(50)
    assert measured == []
    row = rows.timed_row(run, [floor.time_us / 2], **named)
    assert row.roofline_percent == pytest.approx(50)
    assert (row.copy_gbs, row.matmul_tflops) == (4 * CEILINGS.copy_gbs, CEILINGS.matmul_tflops["fp32"])
    # even the higher ceiling is passed: a cache may hold what the roof counts as memory
    assert rows.timed_row(run, [floor.time_us / 8], **named).roofline_percent == pytest.approx(200)
    assert measured == [True]


def test_without_git_the_commit_is_the_environment_s_or_unknown(monkeypatch) -> None:
    monkeypatch.setattr(session.shutil, "which", lambda name: None)
    monkeypatch.delenv("ROOFTILE_COMMIT", raising=False)
    assert session.commit() == "unknown"
    monkeypatch.setenv("ROOFTILE_COMMIT", "c0ffee")
    assert session.commit() == "c0ffee"


# clocks


def test_calls_are_timed_in_a_loop_without_garbage_collection() -> None:
    seen = []
    assert len(clock.CallClock(torch.device("cpu"), calls=7).samples(lambda: seen.append(gc.isenabled()))) == 1
    assert seen == [False] * 7
    assert gc.isenabled()


def test_kernels_alone_are_the_sum_of_what_the_profiler_saw_on_the_gpu(monkeypatch) -> None:
    monkeypatch.setattr(overhead, "device_intervals", lambda work, calls: [(0, 3000), (1000, 2000), (9000, 9500)] * calls)
    assert overhead.kernel_times(lambda: None, calls=4) == (4.5, 3.0)


# the table of suites


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_a_suite_s_cases_are_found_by_name_and_pattern(suite) -> None:
    module = suite.load()
    assert module.GPU or module.CPU
    assert set(module.QUICK) <= set(module.GPU)
    device = "cuda" if module.GPU else "cpu"
    every = module.GPU or module.CPU
    assert suite.chosen(device) == list(every)
    assert suite.chosen(device, [every[-1]]) == [every[-1]]
    asked = getattr(module, "ASKED", ())
    assert set(suite.chosen(device, ["*"])) == {*module.GPU, *module.CPU, *asked}
    assert set(asked).isdisjoint(every)
    assert suite.chosen("cuda", quick=True) == list(module.QUICK) if module.GPU else True
    with pytest.raises(InvalidInput, match=f"bench {suite.name} has no case 'nope'; has "):
        suite.chosen(device, ["nope"])


def test_a_suite_that_measures_another_device_says_so() -> None:
    with pytest.raises(Unsupported, match="bench paged measures a GPU, and the device is cpu"):
        SUITES["paged"].run(SESSION)
    with pytest.raises(Unsupported, match="bench cpu measures a CPU, and the device is cuda"):
        SUITES["cpu"].chosen("cuda")


# the suites, on small problems


def test_overhead_times_the_host_for_ours_and_pytorch() -> None:
    found = list(overhead.host(SESSION, calls=2, rounds=2))
    assert [(row.phase, row.backend) for row in found] == [
        (phase, backend) for phase in ("fwd", "fwd with gradients", "bwd", "decode") for backend in ("rooftile", "torch-flash")
    ]
    assert all(row.case == "host" and row.median_us > 0 and row.samples == 2 for row in found)


def test_overhead_calls_compute_attention() -> None:
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    dense = rt.attention(q[:, -1:], k, v, rt.CAUSAL)
    torch.testing.assert_close(rt.attention_paged(q[:, -1:], overhead.paged(k, v), rt.CAUSAL), dense)


def test_short_problems_have_the_time_per_call_beside_the_device_s(monkeypatch) -> None:
    monkeypatch.setattr(overhead, "PROVIDERS", ("eager", "torch-cudnn"))
    monkeypatch.setattr(overhead, "ROUNDS", 1)
    monkeypatch.setattr(overhead, "CALLS", 2)
    found = list(overhead.short(SESSION, "gqa2", quiet))
    assert [(row.backend, row.phase) for row in found] == [
        ("eager", "fwd"), ("torch-cudnn", "fwd"), ("eager", "bwd"), ("torch-cudnn", "bwd")
    ]  # fmt: skip
    for row in found[::2]:
        assert (row.suite, row.case) == ("overhead", "gqa2")
        assert set(row.measures) == {"call_us"}
        assert row.tflops == pytest.approx(flops.count(CASES["gqa2"].problem(), row.phase) / row.median_us / 1e6, rel=1e-4)
    assert found[1].reason == "refused: tensors are on cpu; is for CUDA"


def test_the_price_of_determinism_is_the_time_that_it_takes_longer() -> None:
    plain, asked = deterministic.measure(SESSION, ["t65"], quiet)
    assert (plain.backend, asked.backend, asked.phase) == ("rooftile", "rooftile, deterministic", "bwd")
    assert asked.measures["extra_time_percent"] == pytest.approx(100 * (asked.median_us / plain.median_us - 1), abs=0.1)


def test_packed_problems_have_the_same_tokens_and_their_own_pairs() -> None:
    cases = packed.problems("d64-causal")
    for case in cases.values():
        assert sum(T for T, _ in case.problem().sizes.sequences) == 16_384
        assert case.H == 32
    assert [case.Hk for case in cases.values()] == [32, 8, 4, 32, 32]
    lengths = packed.packed_lengths(0, 16_384)
    assert cases["packed-0"].problem().pairs == sum(n * (n + 1) // 2 for n in lengths)
    found = list(packed.measure(SESSION, ["tiny-d64-causal"], quiet))
    assert [row.case.removeprefix("tiny-d64-causal-") for row in found[:5]] == list(cases)
    assert found[0].measures["of_dense_ratio"] == 1.0
    assert {row.phase for row in found} == {"fwd", "bwd"}


def test_precision_is_timed_end_to_end_and_in_parts() -> None:
    found = list(precision.measure(SESSION, ["t65"], quiet))
    assert [(row.backend, row.phase) for row in found] == [
        ("rooftile", "fwd"),
        *((name, phase) for name in ("fp8", "int8") for phase in ("fwd", "quantise", "attention alone")),
    ]
    for row in found:
        assert (row.gbs is None) == (row.phase != "quantise")
        assert (row.tflops is None) == (row.phase == "quantise")


def test_flash_attention_3_is_given_the_same_problem_in_fp8(monkeypatch) -> None:
    """By its interface: a scale for each sequence and key head multiplies the codes."""
    case = replace(CASES["causal-more-keys"], H=4, Hk=2)
    inputs = case.inputs(torch.device("cpu"))

    def flash_attn_func(q, k, v, softmax_scale, causal, q_descale, k_descale, v_descale):
        assert causal
        assert {x.dtype for x in (q, k, v)} == {torch.float8_e4m3fn}
        wide = [
            x.float() * scale.repeat_interleave(x.shape[2] // case.Hk, 1)[:, None, :, None]
            for x, scale in ((q, q_descale), (k, k_descale), (v, v_descale))
        ]
        return rt.attention(*wide, rt.CAUSAL, scale=softmax_scale)

    monkeypatch.setattr(precision, "import_module", lambda name: SimpleNamespace(flash_attn_func=flash_attn_func))
    found, due = precision.flash_attention_3(case, inputs)(), rt.attention(*inputs.tensors[:3], inputs.mask)
    assert (found - due).norm() / due.norm() < 0.08  # e4m3 keeps 3 bits of fraction
    assert (found.roll(1, 2) - due).norm() / due.norm() > 0.5


def test_the_memory_of_a_long_sequence_is_that_of_a_process_of_its_own(monkeypatch) -> None:
    asked = []
    done = SimpleNamespace(stdout="4096 12.5\n")
    monkeypatch.setattr(cpu.subprocess, "run", lambda command, **_: asked.append(command[1:]) or done)
    tiled, sdpa = cpu.measure(SESSION, ["memory-32768-h8"], quiet)
    assert asked[0] == ["-m", "rooftile_lab.bench.suites.cpu", "tiled", "32768", "8"]
    assert (tiled.case, tiled.phase, tiled.peak_bytes, tiled.median_us) == ("cpu-fp32-d64-causal-32768-h8", "fwd+bwd", 4096, 12.5)
    assert sdpa.backend == "sdpa"


def test_a_process_that_is_measured_prints_its_memory_and_time() -> None:
    used, us = cpu.once("tiled", 64, 1)
    assert isinstance(used, int)
    assert us > 0


# bytes


def test_traffic_is_the_size_of_the_tensors() -> None:
    x, weight = torch.empty(3, 64, dtype=torch.bfloat16), torch.empty(64, dtype=torch.bfloat16)
    assert traffic.norm(3, 64, 2) == Traffic(x.nbytes + weight.nbytes, x.nbytes)
    assert traffic.norm(3, 64, 2, added=True, weights=2) == Traffic(2 * x.nbytes + 2 * weight.nbytes, 2 * x.nbytes)
    both = torch.empty(3, 128, dtype=torch.bfloat16)
    assert traffic.gate(3, 64, 2) == Traffic(both.nbytes, x.nbytes)
    heads, cos = torch.empty(5, 4, 64, dtype=torch.bfloat16), torch.empty(5, 32)
    assert traffic.rotate(5, 4, 64, 2) == Traffic(heads.nbytes + 2 * cos.nbytes, heads.nbytes)
    assert traffic.cache_write(5, 4, 64, 2) == Traffic(2 * heads.nbytes, 2 * heads.nbytes)
    assert traffic.cache_write(5, 4, 64, 2, rotated=True) == Traffic(2 * heads.nbytes + 2 * cos.nbytes, 2 * heads.nbytes)


def test_a_prediction_is_what_a_call_of_the_operator_counts() -> None:
    """Bytes predicted from sizes, and those of the tensors of a call; slots are 8 bytes each and are not predicted."""
    rows, weight = torch.randn(5, 64), torch.ones(64)
    normed, gated = torch.empty(5, 64), torch.empty(5, 32)
    heads, angles = torch.randn(5, 4, 64), torch.rand(5, 32)
    slots, cache = torch.arange(5), torch.zeros(2, 16, 4, 64)
    write = (heads, heads.clone(), cache, cache.clone(), slots, angles, angles.clone(), None, None)
    copies = torch.tensor([[0, 1]])
    for found, name, arguments, result, beside in (
        (traffic.norm(5, 64, 4), "normalise", (rows, weight, None, 1e-6, False), normed, 0),
        (traffic.norm(5, 64, 4, added=True), "add_norm", (rows, rows.clone(), weight, None, 1e-6, False), normed, 0),
        (traffic.gate(5, 32, 4), "gated", (rows, "silu"), gated, 0),
        (traffic.rotate(5, 4, 64, 4), "rotate", (heads, angles, angles.clone()), torch.empty_like(heads), 0),
        (traffic.cache_write(5, 4, 64, 4, rotated=True), "write_kv", write, None, slots.nbytes),
        (traffic.copy(cache[0].nbytes), "copy_blocks", (cache, copies), None, copies.nbytes),
    ):
        counted = counts.work(name, arguments, result)
        assert (found.read + beside, found.written) == (counted.read, counted.written), name


def test_decode_reads_the_cache_and_its_scales_once() -> None:
    case = CASES["gqa8"]
    problem, inputs = case.problem(), case.inputs()
    q, k, v = inputs.tensors
    assert traffic.decode(problem) == Traffic(q.nbytes + k.nbytes + v.nbytes, q.nbytes)
    scales = k.shape[0] * k.shape[1] * k.shape[2]
    in_fp8 = k.numel() + v.numel() + 2 * 4 * scales
    assert traffic.decode(problem, kv_itemsize=1, scale_itemsize=4) == Traffic(q.nbytes + in_fp8, q.nbytes)
    numbers = q.numel() + k.numel() + v.numel()
    mean = k.shape[0] * 7 * k.shape[2] * k.shape[3]
    assert traffic.quantise(problem, keys_for_mean=7) == Traffic(4 * (numbers + mean), numbers)


def test_a_decoder_s_kernels_and_definitions_agree_and_move_what_is_counted() -> None:
    decoder = pytest.importorskip("rooftile_lab.bench.suites.decoder")
    for what in (*decoder.NORMS, "head-norm", *decoder.GATES):
        one = decoder.contest_of(torch.device("cpu"), what, 2, 64)
        ours, defined = one.ours(), one.defined()
        torch.testing.assert_close(ours, defined)
        written = ours if isinstance(ours, tuple) else (ours,)
        assert one.moved.written == sum(x.nbytes for x in written)


def test_device_intervals_are_those_of_the_gpu(monkeypatch) -> None:
    kinds = torch.autograd.DeviceType
    seen = [("kernel", 0, 3, kinds.CUDA), ("cudaLaunchKernel", 0, 9, kinds.CPU), ("Memset", 5, 6, kinds.CUDA)]
    events = [
        SimpleNamespace(name=lambda n=n: n, start_ns=lambda a=a: a, end_ns=lambda b=b: b, device_type=lambda k=k: k)
        for n, a, b, k in seen
    ]

    class Profile:
        profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

        def __init__(self, **_) -> None: ...

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None: ...

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert profiler.device_intervals(lambda: None, 2) == [(0, 3), (5, 6)]


class EveryCallOnce:
    """A clock that runs each work once per sample and says that it took 5 and 6 µs."""

    peak_kind = ""

    def samples(self, work) -> list[float]:
        work()
        return [5.0, 6.0]

    def peak_bytes(self, work) -> int:
        return 0


def test_paged_contests_read_one_cache_in_all_its_forms(monkeypatch) -> None:
    attention = rt.attention_paged
    monkeypatch.setattr(paged, "ReplayClock", EveryCallOnce)
    monkeypatch.setattr(paged, "captured", lambda work: SimpleNamespace(replay=work))
    monkeypatch.setattr(paged, "DIM", 16)
    monkeypatch.setattr(paged, "OWN", 32)
    monkeypatch.setattr(paged, "find_spec", lambda name: None)
    # a CPU gathers, whatever the backend
    monkeypatch.setattr(paged.rt, "attention_paged", lambda *a, backend=None, **more: attention(*a, **more))
    decode = list(paged.decode(SESSION, EveryCallOnce(), "decode", 2, 128, 4, 2))
    assert [row.backend for row in decode] == [
        "rooftile, block 16", "triton, block 16", "rooftile, fp8, block 16", "rooftile, block 128"
    ]  # fmt: skip
    cached, queries = 2 * 128 * 2, 2 * 4 * 16 * 2 * 2
    assert decode[0].gbs == pytest.approx((cached * 2 * 16 * 2 + queries) / 5.5e3, rel=1e-4)
    assert decode[2].gbs == pytest.approx((cached * 2 * (16 + 4) + queries) / 5.5e3, rel=1e-4)
    assert all(row.measures == {"alone_us": 5.5} and row.binds == "memory" for row in decode)
    prefill = list(paged.prefill(SESSION, EveryCallOnce(), "prefill", 2, 256, 4, 2))
    assert [row.measures["of_dense_ratio"] for row in prefill] == [1.0] * 6
    once, each = paged.shared(SESSION, EveryCallOnce(), "shared", 2, 64, 4, 2)
    assert {once.backend, each.backend} == {"rooftile, each reads the prefix", "rooftile, the prefix is read once"}


def test_cache_operations_are_timed_per_layer_and_move_what_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(cache, "ReplayClock", lambda times: EveryCallOnce())
    for name, value in {"LAYERS": 4, "BLOCKS": 64, "HEADS": 2, "DIM": 16, "TOKENS": 64, "COPIES": 4}.items():
        monkeypatch.setattr(cache, name, value)
    found = {row.case: row for row in cache.cache(SESSION, EveryCallOnce())}
    assert list(found) == ["append", "append-rotated", "rotate-queries", "copy-blocks"]
    us = 5.5 / 4
    line = 64 * 2 * 16 * 2
    assert found["append"].median_us == pytest.approx(us)
    assert found["append"].gbs == pytest.approx(4 * line / us / 1e3, rel=1e-4)
    block = 16 * 2 * 16 * 2
    assert found["copy-blocks"].gbs == pytest.approx(2 * 4 * 4 * 2 * block / us / 1e3, rel=1e-4)


def test_products_are_compared_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftile_lab.bench.suites import linear

    case = linear.case_of("small-int8-r16", torch.device("cpu"), "fp32")
    works, why = linear.contestants(case)
    assert set(works) == {"rooftile", "fp32", "torch-int-mm"}
    assert set(why) == {"hopper", "triton", "library"}
    wrong = (("int8",), lambda case: (lambda: [torch.zeros(16, 256)], [torch.ones(16, 256)]))
    monkeypatch.setitem(linear.PEERS, "wrong", wrong)
    monkeypatch.setitem(linear.PEERS, "broken", (("int8",), lambda case: 1 / 0))
    _, why = linear.contestants(case)
    assert why["wrong"] == "its error is 100.0% of what is due; may be 2%"
    assert why["broken"] == "ZeroDivisionError: division by zero"
    found = linear.roof_of(SESSION, case)
    assert found.flops == 2 * 16 * 256 * 256
    assert found.bytes_moved == 2 * 16 * 256 * 4 + 256 * 256 + 256 * 4


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_products_of_2_4_weights_are_compared_before_they_are_timed(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    from rooftile_lab.bench.suites import sparsity

    case = sparsity.case_of(f"small-{format}-r16", torch.device("cpu"), "fp32")
    works, why = sparsity.contestants(case, "fp32")
    # PyTorch multiplies dense FP8 on a CPU, too
    assert set(works) == {"rooftile", "fp32"} | ({"rooftile-of-codes", "torch-scaled-mm-rows"} if format == "fp8" else set())
    assert {"triton", "library", "dense"} <= set(why)
    allowed = {"bf16": 1e-5, "fp8": 0.1}[format]
    for y, z in zip(works["rooftile"](), works["fp32"](), strict=True):
        assert float((y - z).abs().mean()) <= allowed * float(z.abs().mean())
    monkeypatch.setitem(sparsity.PEERS, "wrong", (format, lambda case: lambda: [torch.zeros(16, 256)]))
    monkeypatch.setitem(sparsity.PEERS, "broken", (format, lambda case: 1 / 0))
    _, why = sparsity.contestants(case, "fp32")
    assert why["wrong"].startswith("its error is 100.0% of what is due; may be ")
    assert why["broken"] == "ZeroDivisionError: division by zero"
    found = sparsity.roof_of(SESSION, case)
    assert found.flops == 2 * 16 * 256 * 256
    kept = {"bf16": 4 * 128, "fp8": 128}[format] + 32 + (4 if format == "fp8" else 0)
    assert found.bytes_moved == 2 * 16 * 256 * 4 + 256 * kept


@pytest.mark.parametrize(("what", "bits"), [("mask", 24), ("transposable", 24), ("compress", 16 + 8 + 9), ("dense", 16 + 9)])
def test_passes_over_a_weight_count_its_bytes(monkeypatch: pytest.MonkeyPatch, what: str, bits: int) -> None:
    from rooftile_lab.bench.suites import sparsity

    def timed(session, works, clock, *, roofs, **named):
        works["rooftile"]()
        works["copy"]()
        assert roofs.bytes_moved == 256 * 256 * bits / 8
        us = {"rooftile": 8.0, "copy": 6.0}
        return {name: rows.timed_row(SESSION, [time_us], backend=name, **named) for name, time_us in us.items()}

    monkeypatch.setattr(sparsity, "contest", timed)
    ours, copy = sparsity.measure(SESSION, [f"{what}-256x256"], print)
    assert ours.measures == {"of_copy_percent": 75.0}
    assert (copy.backend, copy.median_us) == ("copy", 6.0)


def test_fbgemm_is_given_our_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the layout that FBGEMM documents: signed nibbles, the first in the low half; scales and zeros (K / group, N)."""
    from rooftile_lab.bench.suites import linear

    def multiplied(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        assert codes.dtype == torch.int8
        numbers = torch.stack((codes << 4 >> 4, codes >> 4), -1).flatten(1).float()
        wide = [y.float().T.repeat_interleave(numbers.shape[1] // y.shape[0], 1) for y in (scales, zeros)]
        return (x.float() @ (numbers * wide[0] + wide[1]).T).to(x.dtype)

    case = linear.case_of("small-int4-r16", torch.device("cpu"), "bf16")
    _, why = linear.contestants(case)
    assert "No module named 'fbgemm_gpu'" in why["fbgemm-int4"]
    found = SimpleNamespace(preshuffle_i4=lambda codes, scales: (codes, scales), bf16i4bf16_shuffled=multiplied)
    monkeypatch.setattr(linear, "fbgemm_operators", lambda: found)
    works, _ = linear.contestants(case)
    torch.testing.assert_close(works["fbgemm-int4"](), works["rooftile"](), rtol=2e-2, atol=2e-2)
    found.preshuffle_i4 = lambda codes, scales: (codes.roll(1, 1), scales)
    _, why = linear.contestants(case)
    assert "of what is due" in why["fbgemm-int4"]


def test_humming_is_given_our_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the layout of its own quantiser: int32 words of eight codes with 8 added, along K; scales (N, K / group)."""
    from rooftile_lab.bench.suites import linear

    class Layer(torch.nn.Module):
        def __init__(self, *, shape_n: int, shape_k: int, weight_config: dict, torch_dtype: torch.dtype) -> None:
            super().__init__()
            assert (weight_config, torch_dtype) == ({"dtype": "uint4", "group_size": 128}, torch.bfloat16)
            self.shape = shape_n, shape_k

        def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
            words, scales = tensors["weight"], tensors["weight_scale"]
            assert words.dtype == torch.int32
            codes = ((words[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(1) - 8
            self.w = (codes.float() * scales.float().repeat_interleave(128, 1)).bfloat16()
            assert self.w.shape == self.shape

        def transform(self) -> None:
            self.ready = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.ready
            return x @ self.w.T

    case = linear.case_of("small-int4-r16", torch.device("cpu"), "bf16")
    _, why = linear.contestants(case)
    assert "No module named 'humming'" in why["humming-int4"]
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=Layer))
    monkeypatch.setitem(sys.modules, "humming", SimpleNamespace())
    works, _ = linear.contestants(case)
    torch.testing.assert_close(works["humming-int4"](), works["rooftile"](), rtol=2e-2, atol=2e-2)
