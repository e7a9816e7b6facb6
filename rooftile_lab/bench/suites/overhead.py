"""Time on the host: what a call costs before a kernel starts, and what that leaves of short causal problems.

`host` calls attention on small tensors, so that the GPU is never waited for: the median of the host's time per call over
nine loops of 1,000 calls, without garbage collection, for

    fwd                   rt.attention without gradients
    fwd with gradients    the same, with q, k and v that require gradients
    bwd                   the backward alone, on a kept graph
    decode                one query per sequence against a paged cache; for PyTorch against a dense one

The causal cases are timed three ways, in one run with the peers:

    median_us     on the device, as in `rooftile bench attention`: the host is ahead, so its time does not count
    call_us       per call in a loop of calls: whichever of host and device takes longer
    kernels_us    the kernels of a call alone, from the profiler: what is left if the host costs nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import rooftile as rt
from rooftile.cost.session import Session
from rooftile.exact.cases import CASES as PROBLEMS
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import CallClock, Work, take_turns
from rooftile.hardware.profiler import device_intervals
from rooftile.kvcache import PagedKV
from rooftile_lab.bench import peers
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import measured, timed_row
from rooftile_lab.bench.run import Progress, timed_work
from rooftile_lab.bench.run import measure as measure_case

HOST = "host"
SHORT = tuple(f"d{dim}-causal-{length}" for dim in (64, 128) for length in ("512", "1k"))
GPU = (HOST, *SHORT)
CPU = (HOST,)
QUICK = (HOST, "d64-causal-512", "d128-causal-1k")
PROVIDERS = ("rooftile", "torch-flash", "torch-cudnn", "fa4", "fa3")
ROUNDS = 9
# calls in a loop that waits for the device
CALLS = 100
B, T, H, D = 1, 128, 2, 64
PAGE = 16


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant and phase."""
    for name in names:
        say(name)
        yield from host(session) if name == HOST else short(session, name, say)


def host(session: Session, calls: int = 1000, rounds: int = ROUNDS) -> Iterator[Row]:
    """Rows whose times are the host's, per call. `median_us` is the median of the loops."""
    clock = CallClock(session.device, calls)
    problem = f"{session.dtype}, causal, B {B} T {T} S {T} H {H} D {D}"
    # its cost on the host is no part of a call
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for phase, works in host_calls(session).items():
            for work in works.values():
                clock.samples(work)
            for backend, samples in take_turns(works, clock, rounds).items():
                yield timed_row(
                    session, samples, dtype=session.dtype, suite="overhead", case=HOST, backend=backend, phase=phase,
                    problem=problem, settings={"calls": calls, "timed": "host"},
                )  # fmt: skip


def host_calls(session: Session) -> dict[str, dict[str, Work]]:
    """Calls by phase and contestant."""
    dtype = DTYPES[session.dtype]
    q, k, v = (torch.randn(B, T, H, D, device=session.device, dtype=dtype) for _ in range(3))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]  # (B, H, T, D), as PyTorch takes it
    contestants: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "rooftile": (partial(rt.attention, mask=rt.CAUSAL), [q, k, v]),
        "torch-flash": (partial(F.scaled_dot_product_attention, is_causal=True), heads_first),
    }
    if session.device.type == "cuda":
        contestants["triton"] = (partial(rt.attention, mask=rt.CAUSAL, backend="triton"), [q, k, v])
    found: dict[str, dict[str, Work]] = {"fwd": {}, "fwd with gradients": {}, "bwd": {}}
    for name, (forward, inputs) in contestants.items():
        leaves = [x.detach().requires_grad_() for x in inputs]
        # the first call of a kind prepares the others
        forward(*leaves)
        o = forward(*leaves)
        found["fwd"][name] = partial(forward, *inputs)
        found["fwd with gradients"][name] = partial(forward, *leaves)
        found["bwd"][name] = partial(torch.autograd.grad, o, leaves, torch.randn_like(o), retain_graph=True)
    # a query per sequence; PyTorch has no pages
    found["decode"] = {
        "rooftile": partial(rt.attention_paged, q[:, :1], paged(k, v), rt.CAUSAL),
        "torch-flash": partial(F.scaled_dot_product_attention, heads_first[0][:, :, :1], heads_first[1], heads_first[2]),
    }
    return found


def paged(k: Tensor, v: Tensor) -> PagedKV:
    """The keys and values of a dense batch in pages of PAGE tokens."""
    length = k.shape[1]
    table = torch.arange(k.shape[0] * length // PAGE, device=k.device, dtype=torch.int32).view(k.shape[0], -1)
    lengths = torch.full((k.shape[0],), length, device=k.device, dtype=torch.int32)
    return PagedKV(k.reshape(-1, PAGE, *k.shape[2:]), v.reshape(-1, PAGE, *v.shape[2:]), table, lengths)


def short(session: Session, name: str, say: Progress) -> Iterator[Row]:
    """Rows of one problem as `rooftile bench attention` has them, with the time per call in a loop and of the kernels alone."""
    case = PROBLEMS[name]
    rows = measure_case(case, PROVIDERS, session=session, on_progress=say)
    inputs = case.inputs(session.device, requires_grad=True)
    do = torch.randn_like(inputs.tensors[0])
    clock = CallClock(session.device, CALLS, wait=True)
    for phase in ("fwd", "bwd"):
        works = {
            row.backend: timed_work(peers.provider_named(row.backend).prepare(case, inputs), inputs, do, phase)
            for row in rows
            if row.phase == phase and not row.reason
        }
        say(f"{name}: {phase} in a loop")
        called = take_turns(works, clock, ROUNDS)
        for row in rows:
            if row.phase == phase:
                work = works.get(row.backend)
                more = measured({} if work is None else alone(session, called[row.backend], work))
                yield replace(row, suite="overhead", measures=more["measures"], low=more["low"], high=more["high"])


def alone(session: Session, called: Sequence[float], work: Work) -> dict[str, Sequence[float]]:
    """The time per call in a loop, and on a GPU the time of its kernels alone."""
    taken: dict[str, Sequence[float]] = {"call_us": called}
    if session.device.type == "cuda":
        kernels = [kernel_times(work) for _ in range(3)]
        taken |= {"kernels_us": [us for us, _ in kernels], "kernels_per_call": [count for _, count in kernels]}
    return taken


def kernel_times(work: Work, calls: int = 10) -> tuple[float, float]:
    """Returns the µs that the kernels of one call take on the GPU, and their number: from torch's profiler, mean of `calls`.

    Copies and fills count as kernels. Gaps between kernels do not count, so this is the least that a call could take.
    """
    intervals = device_intervals(work, calls)
    return sum(stop - start for start, stop in intervals) / calls / 1e3, len(intervals) / calls
