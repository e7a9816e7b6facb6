"""Predictions on the simulated machine are exact; remedies that save the same time are not added up."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftile.diagnosis.records import StepCall
from rooftile.diagnosis.remedies import propose
from rooftile.diagnosis.remedies.fusion.chains import find_chains, fuse
from rooftile.diagnosis.remedies.prices import (
    another_attention,
    cuda_graph,
    larger_batch,
    load_beside,
    overlap_copy,
    pad,
    recompute,
    remove_synchronisation,
    remove_wait,
    store,
)  # fmt: skip
from rooftile.diagnosis.remedies.remedy import Remedy, ranked, together
from rooftile.diagnosis.verdicts.step import StepEvidence
from rooftile.diagnosis.watching.host_place import HostPlace
from rooftile.errors import InvalidInput
from tests.diagnosis.machine import Machine, Work, finding, narrower_dtype

CPU = Machine(flops_per_us=1e5, bytes_per_us=1e4, cache_bytes_per_us=1e5, fixed_us=5.0)
GPU = Machine(flops_per_us=5e8, bytes_per_us=4e6, cache_bytes_per_us=1.2e7, fixed_us=2.0, launch_us=5.0, device="cuda")
SIZE = 4 * 10**6


def pointwise(row: int, reads: tuple[int, ...], write: int, size: int = SIZE) -> StepCall:
    return StepCall(row=row, reads=dict.fromkeys(reads, size), writes={write: size}, pointwise=True)


def moved(call: StepCall) -> int:
    return sum(call.reads.values()) + sum(call.writes.values())


def test_a_fused_chain_reads_its_inputs_once_and_writes_its_result() -> None:
    """y = gelu(x * g) + x: intermediate values go away, x is read once."""
    calls = [pointwise(0, (1, 2), 3), pointwise(1, (3,), 4), pointwise(2, (4, 1), 5)]
    (chain,) = find_chains(calls)
    assert chain.bytes_now == 8 * SIZE
    assert chain.bytes_fused == 3 * SIZE
    # a backward has saved the argument of gelu: it is written all the same
    assert find_chains(calls, kept={3})[0].bytes_fused == 4 * SIZE
    # ... or somebody reads it later
    assert find_chains([*calls, StepCall(row=3, reads={3: SIZE}, writes={9: 8}, pointwise=False)])[0].bytes_fused == 4 * SIZE
    # ... but a reader before the chain is none
    assert find_chains([StepCall(row=3, reads={3: SIZE}, writes={}, pointwise=False), *calls])[0].bytes_fused == 3 * SIZE


def test_in_place_is_read_and_written_once() -> None:
    calls = [StepCall(row=i, reads={1: SIZE}, writes={1: SIZE}, pointwise=True) for i in range(3)]
    (chain,) = find_chains(calls)
    assert (chain.bytes_now, chain.bytes_fused) == (6 * SIZE, 2 * SIZE)


def test_chains_end_at_a_product_and_where_nothing_is_handed_on() -> None:
    product = StepCall(row=9, reads={3: SIZE}, writes={4: SIZE}, pointwise=False)
    calls = [
        pointwise(0, (1,), 2), pointwise(1, (2,), 3), product, pointwise(2, (4,), 5), pointwise(3, (5,), 6),
        pointwise(4, (20,), 21), pointwise(5, (30,), 31),
    ]  # fmt: skip
    assert [[call.row for call in chain.calls] for chain in find_chains(calls)] == [[0, 1], [2, 3]]
    assert find_chains([]) == []
    assert find_chains([product, replace(product, row=8)]) == []


@given(st.integers(2, 6), st.floats(0.01, 30), st.integers(1, 5))
def test_a_fused_chains_price_is_exact(length: int, intensity: float, layers: int) -> None:
    """x is read, changed `length` times, and written: one kernel does all the arithmetic on two transfers."""
    per_call = Work(bytes=2 * SIZE, flops=SIZE * intensity)
    calls, kept = [], set()
    for layer in range(layers):
        first = 100 * layer
        calls += [pointwise(i, (first + i,), first + i + 1) for i in range(length)]
        # something else lies between the layers
        calls.append(StepCall(row=length, reads={first + length: SIZE}, writes={first + 100: SIZE}, pointwise=False))
        kept.add(first + length)
    findings = [finding(CPU, per_call, calls=layers, index=i, op=f"aten::op{i}") for i in range(length + 1)]
    (remedy,) = fuse(find_chains(calls, kept), findings)
    before = length * CPU.exact(per_call)
    after = CPU.exact(Work(bytes=2 * SIZE, flops=length * per_call.flops))
    assert remedy.predicted_us == pytest.approx(max(0.0, layers * (before - after)), rel=1e-6)
    assert remedy.ops == tuple(range(length))
    assert f"{2 * SIZE * (length - 1) * layers / 1e6:,.1f} MB and {(length - 1) * layers} launches fewer" in remedy.how
    assert "train.py:7" in remedy.how


def test_a_librarys_kernel_that_a_compiler_replaces_takes_the_time_of_the_ceilings() -> None:
    """A norm whose kernel takes 500 us longer than its bytes need, and a relu."""
    work = Work(bytes=2 * SIZE, flops=0.0)
    findings = [finding(GPU, work, index=i, op=f"aten::op{i}") for i in range(2)]
    findings[0] = replace(findings[0], time_us=findings[0].time_us + 500.0)
    saved = []
    for anew in (False, True):
        # the norm reads its input twice
        chains = find_chains([replace(pointwise(0, (1,), 2), passes=2, anew=anew), pointwise(1, (2,), 3)])
        assert chains[0].bytes_fused == 3 * SIZE
        saved.append(fuse(chains, findings)[0].predicted_us)
    assert saved[1] == pytest.approx(500.0 + 2 * GPU.exact(work) - GPU.exact(replace(work, bytes=3 * SIZE)))
    # a kernel that stays as it is keeps its pace
    assert saved[0] < saved[1] - 300.0


@given(st.floats(0.01, 5000), st.sampled_from((1.0, 2.0, 4.0, 16.0)), st.integers(1, 7))
def test_a_narrower_dtypes_price_is_exact(intensity: float, faster: float, calls: int) -> None:
    wide = Work(bytes=4 * SIZE, flops=4 * SIZE * intensity)
    remedy = narrower_dtype([(3, finding(GPU, wide, calls=calls))], "bf16", rate_ratio=faster, bytes_ratio=0.5)
    narrow = replace(GPU, flops_per_us=GPU.flops_per_us * faster).exact(replace(wide, bytes=wide.bytes / 2))
    saved = calls * (GPU.exact(wide) - narrow)
    if GPU.exact(wide) < 2 * GPU.fixed_us:
        assert remedy is None
    elif saved < 1e-9:
        assert remedy is None or remedy.predicted_us == pytest.approx(0.0, abs=1e-6)
    else:
        assert remedy is not None
        assert remedy.predicted_us == pytest.approx(saved, rel=1e-6)
        assert (remedy.ops, remedy.changes) == ((3,), "rounding")
        assert "torch.bfloat16" in remedy.how


def test_a_narrower_dtype_does_not_help_a_latency() -> None:
    chain = Work(bytes=100, flops=100)
    assert narrower_dtype([(0, finding(GPU, chain))], "bf16", rate_ratio=10, bytes_ratio=0.5) is None


def test_special_functions_are_as_slow_in_a_narrower_dtype() -> None:
    """Exponentials of 100 us: the multiply-adds would be 16 times as fast, and they are not what takes the time."""
    its = finding(GPU, Work(bytes=1e3, flops=100 * GPU.flops_per_us))
    assert narrower_dtype([(0, its)], "bf16", rate_ratio=16, bytes_ratio=0.5) is not None
    special = replace(its, verdict=replace(its.verdict, unit="special", model=replace(its.verdict.model, compute="special")))
    assert narrower_dtype([(0, special)], "bf16", rate_ratio=16, bytes_ratio=0.5) is None


def tiled(m: int, n: int, k: int, *, aligned: bool) -> float:
    """The machine's time of a product: whole waves of tiles; rows that are not aligned take three times as long."""
    waves = ceil(ceil(m / 128) * ceil(n / 128) / 132)
    return waves * 132 * 2 * 128 * 128 * k / GPU.flops_per_us * (1 if aligned else 3) + GPU.fixed_us


@given(st.integers(1, 64), st.integers(1000, 60000), st.integers(4, 64))
def test_the_price_of_padding_is_exact(blocks: int, n: int, k_blocks: int) -> None:
    m, k = 128 * blocks, 64 * k_blocks
    its = finding(GPU, Work(bytes=1.0, flops=2.0 * m * n * k))
    now = tiled(m, n, k, aligned=False)
    its = replace(its, time_us=now, verdict=replace(its.verdict, bound="compute"))
    remedy = pad((0, its), (m, n, k), multiprocessors=132)
    if n % 64 == 0:
        assert remedy is None
    else:
        assert remedy is not None
        padded = ceil(n / 64) * 64
        assert remedy.predicted_us == pytest.approx(now - tiled(m, padded, k, aligned=True))


def test_padding_names_the_tiles() -> None:
    its = finding(GPU, Work(bytes=1e6, flops=2.0 * 8192 * 50257 * 768))
    slow = replace(its, time_us=3 * its.time_us)
    remedy = pad((4, slow), (8192, 50257, 768), multiprocessors=132)
    assert remedy is not None
    assert remedy.how == "pad 50257 to 50304: 64 x 393 tiles on 132 multiprocessors, 191 waves"
    memory = replace(slow, verdict=replace(slow.verdict, bound="memory"))
    assert pad((4, memory), (8192, 50257, 768), multiprocessors=132) is None


def test_a_graph_leaves_the_kernels_and_their_nodes() -> None:
    kernels = [GPU.exact(Work(bytes=1e6, flops=1e6)) for _ in range(1000)]
    # the host is late for every kernel
    eager = sum(max(us, 40.0) for us in kernels)
    step = StepEvidence(time_us=eager)
    remedy = cuda_graph(step, busy_us=sum(kernels), launches=1000, node_us=1.0)
    assert remedy is not None
    assert remedy.predicted_us == pytest.approx(eager - sum(us + 1.0 for us in kernels))
    # E1 has measured it
    measured = cuda_graph(replace(step, graph_us=eager / 4), busy_us=1.0, launches=1, node_us=1.0)
    assert measured is not None
    assert measured.predicted_us == pytest.approx(eager * 3 / 4)
    assert cuda_graph(replace(step, graph_us=eager * 1.1), busy_us=1.0, launches=1, node_us=1.0) is None
    refused = cuda_graph(replace(step, why_not={"graph": "loss.item() in train.py:9"}), busy_us=1.0, launches=1, node_us=1.0)
    assert refused is not None
    assert "first make it capturable (loss.item() in train.py:9)" in refused.how


@given(st.floats(1e4, 1e9))
def test_the_price_of_a_larger_batch_is_exact(size: float) -> None:
    one, half, two = (CPU.exact(Work(bytes=size * b, flops=0)) for b in (1, 0.5, 2))
    saved = one - two / 2
    for step in (StepEvidence(time_us=one, double_batch_us=two), StepEvidence(time_us=one, half_batch_us=half)):
        remedy = larger_batch(step)
        assert remedy is not None
        assert remedy.predicted_us == pytest.approx(saved, rel=1e-3)
    fixed = larger_batch(StepEvidence(time_us=one), fixed_us=CPU.fixed_us)
    assert fixed is not None
    assert fixed.predicted_us == pytest.approx(saved, rel=1e-3)
    assert fixed.how.endswith("; by the fixed parts of its operators, as no batch was changed")
    assert larger_batch(StepEvidence(time_us=one)) is None


def test_another_attention_replaces_all_operators_of_the_eager_one() -> None:
    rows = [(i, finding(GPU, Work(bytes=1e9, flops=1e9), calls=12, index=i)) for i in range(4)]
    remedy = another_attention(rows, {"sdpa": 90.0, "hopper": 70.0}, how="rt.attention(q, k, v, rt.CAUSAL)")
    assert remedy is not None
    assert remedy.ops == (0, 1, 2, 3)
    assert remedy.predicted_us == pytest.approx(12 * (4 * GPU.exact(Work(bytes=1e9, flops=1e9)) - 70.0))
    assert "backend hopper" in remedy.how
    assert another_attention(rows[:1], {"hopper": 1e6}, how="") is None


def test_store_and_recompute() -> None:
    cheap = finding(GPU, Work(bytes=8e8, flops=1e8), calls=3)
    stored = store([(2, cheap)], stored_bytes=10**9, module="layers.0")
    assert stored is not None
    assert stored.predicted_us == pytest.approx(3 * GPU.exact(Work(bytes=8e8, flops=1e8)))
    assert "1,000 MB more" in stored.how
    again = recompute([(2, cheap)], stored_bytes=4 * 10**8)
    assert again is not None
    assert again.predicted_us == pytest.approx(2 * 4e8 / GPU.bytes_per_us - 3 * 1e8 / GPU.flops_per_us)
    dear = finding(GPU, Work(bytes=8e8, flops=1e12))
    assert recompute([(2, dear)], stored_bytes=4 * 10**8) is None
    assert recompute([], stored_bytes=8) is None


@pytest.mark.parametrize(
    ("step_us", "data_us", "threads", "cores", "saved_us", "workers"),
    [
        # a GPU's step, and cores enough: what is left is the device's time
        (1000.0, 600.0, 1, 8, 600.0, 2),
        (1000.0, 900.0, 1, 8, 1000 - 900 / 7, 7),
        # two cores that the operators use as well: 600 + 2 * 400 of work on two cores
        (1000.0, 600.0, 2, 2, 300.0, 1),
        # nothing is won on one
        (1000.0, 600.0, 1, 1, None, 1),
    ],
)
def test_workers_share_the_cores_that_there_are(
    step_us: float, data_us: float, threads: int, cores: int, saved_us: float | None, workers: int
) -> None:
    found = load_beside(HostPlace("data.py:3", loads="here"), data_us, step_us=step_us, threads=threads, cores=cores)
    assert (found is None) == (saved_us is None)
    if found is not None:
        assert found.predicted_us == pytest.approx(saved_us)
        assert f"DataLoader(num_workers={workers}), as there are {cores} cores" in found.how


def test_waits() -> None:
    sync = remove_synchronisation("train.py:12", 300.0)
    assert sync is not None
    assert (sync.predicted_us, sync.changes) == (300.0, "nothing")
    assert "train.py:12" in sync.how
    assert remove_synchronisation("train.py:12", 0.0) is None
    place = HostPlace("train.py:3", "json.loads")
    for is_collective in (False, True):
        wait = remove_wait(place, 300.0, is_collective=is_collective)
        assert wait is not None
        assert wait.how.startswith("json.loads, called at train.py:3: ")
        assert ("if it waits for other processes, send less often" in wait.how) == is_collective
        # nothing is loaded
        assert "DataLoader" not in wait.how
    late = remove_wait(place._replace(loads="workers"), 300.0)
    assert late is not None
    assert "the loader's workers are slower than the step" in late.how
    # the kernels cover only as much of the copy as they last
    copy = overlap_copy("train.py:3", copy_us=500.0, busy_us=200.0)
    assert copy is not None
    assert copy.predicted_us == 200.0


def remedy(name: str, us: float, *ops: int, measured_us: float | None = None) -> Remedy:
    return Remedy(name=name, ops=ops, predicted_us=us, measured_us=measured_us, how="", changes="nothing")


def test_ranked_by_prediction_without_those_that_save_nothing() -> None:
    assert [r.name for r in ranked([remedy("a", 1), None, remedy("b", 3), remedy("c", -1), remedy("d", 2)])] == ["b", "d", "a"]


def test_remedies_of_one_operator_are_not_added_up() -> None:
    chosen = together([remedy("fuse", 30, 1, 2), remedy("bf16", 50, 2, 3), remedy("pad", 10, 7)], 1000)
    assert [(r.name, us) for r, us in chosen] == [("bf16", 50), ("pad", 10)]
    # a measured saving counts, not its prediction
    chosen = together([remedy("fuse", 30, 1, 2), remedy("bf16", 50, 2, 3, measured_us=5)], 1000)
    assert [(r.name, us) for r, us in chosen] == [("fuse", 30)]
    both = together([remedy("CUDA graph", 60), remedy("larger batch", 50), remedy("fuse", 10, 0)], 1000)
    assert [r.name for r, _ in both] == ["CUDA graph", "fuse"]
    assert [r.name for r, _ in together([remedy("larger batch", 50), remedy("fuse", 10, 0)], 1000)] == ["larger batch"]


@given(st.lists(st.tuples(st.floats(-10, 100), st.sets(st.integers(0, 8))), max_size=12), st.floats(1, 200))
def test_never_more_than_the_step(savings: list[tuple[float, set[int]]], step_us: float) -> None:
    remedies = [remedy(f"r{i}", us, *sorted(ops)) for i, (us, ops) in enumerate(savings)]
    chosen = together(remedies, step_us)
    assert sum(us for _, us in chosen) <= step_us * (1 + 1e-9)
    rows = [row for r, _ in chosen for row in r.ops]
    assert len(rows) == len(set(rows))


def test_a_remedy_says_what_it_changes() -> None:
    with pytest.raises(InvalidInput, match="must be one of nothing, rounding, memory"):
        Remedy(name="x", predicted_us=1.0, how="", changes="everything")


@given(st.floats(0, 900), st.floats(1, 100))
def test_neither_a_batch_nor_a_graph_saves_what_the_host_waits_for(waiting_us: float, overhead_us: float) -> None:
    """Nothing in a step grows with its batch; the loader's time is no overhead, though no experiment sees it grow."""
    step = StepEvidence(time_us=100 + overhead_us + waiting_us, waiting_us=waiting_us, idle_us={"host": overhead_us + waiting_us})
    doubled = larger_batch(replace(step, double_batch_us=100 + step.time_us))
    halved = larger_batch(replace(step, half_batch_us=step.time_us - 50))
    graph = cuda_graph(replace(step, graph_us=100.0), busy_us=100.0, launches=0, node_us=0.0)
    kernels = cuda_graph(step, busy_us=100.0, launches=0, node_us=0.0)
    for remedy, saved_us in ((doubled, overhead_us / 2), (halved, overhead_us / 2), (graph, overhead_us), (kernels, overhead_us)):
        assert remedy is not None
        assert remedy.predicted_us == pytest.approx(saved_us, rel=1e-6, abs=1e-6)
    # an experiment has run two of them
    assert [remedy.measured_us is not None for remedy in (doubled, halved, graph, kernels)] == [True, False, True, False]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_launches_take_no_part_of_the_hosts_other_work(device: str) -> None:
    step = StepEvidence(time_us=1000, waiting_us=700, idle_us={"host": 800.0}, graph_us=200.0 if device == "cuda" else None)
    its = SimpleNamespace(device=torch.device(device), step=step, findings=[])
    assert propose._overhead_us(its) == pytest.approx(100.0)
