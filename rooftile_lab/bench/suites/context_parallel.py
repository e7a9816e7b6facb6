"""Attention over a sequence on the GPUs of one host beside one GPU's, and PyTorch's context parallelism; under torchrun.

    one-rooftile, one-cudnn    the whole sequence on each GPU: rooftile, and cuDNN by PyTorch's SDPA
    gather, ulysses, ring      `rooftile.parallel.context_attention`
    gather-balanced            the same with layout "balanced", for packed documents; the others have "zigzag"
    torch                      PyTorch's `context_parallel` with cuDNN; "torch-repeated" with key heads repeated, where it fails
                               on groups of query heads

    scaling_ratio              T1 / (P T): T1 is the least time of one GPU, T the time on P GPUs, of the slowest rank
    tflops_of_rank             the FLOPs of the visible pairs over P and the time
    predicted_us               the time that `parallel.plan` predicts from the time of one GPU and the link's measured rate
    sent_mib                   the most that a rank sends, by `parallel.traffic`
    attention_us, transfer_us, other_us    kernels of attention, of NCCL, and all others, in one call by the profiler

Every output and gradient is compared with one GPU's first. The case `link` times the all-gather and the all-to-all alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rooftile as rt
from rooftile import parallel
from rooftile.cost.session import Session
from rooftile.exact.masks import CAUSAL, Mask, Window, pairs
from rooftile.exact.spec import DTYPES, Problem, Sizes, Spec
from rooftile.hardware import link
from rooftile.hardware.clock import Work
from rooftile.parallel import context_attention, shard, traffic
from rooftile_lab.bench.kernel_shares import kernel_shares
from rooftile_lab.bench.ranks import RanksClock
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import tidy

PHASES = ("fwd", "fwd+bwd")
METHODS = ("gather", "ulysses", "ring")
BALANCED = "gather-balanced"
OURS = (*METHODS, BALANCED)
# relative to one GPU's output or gradient, Frobenius: two roundings of bf16 and orders of sums apart
CLOSE = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sequence, or documents of these lengths."""

    tokens: int
    mask: Mask = CAUSAL
    H: int = 32
    Hk: int = 8
    D: int = 128
    documents: tuple[int, ...] = ()

    def __str__(self) -> str:
        documents = f", {len(self.documents)} documents" if self.documents else ""
        return f"{self.tokens} tokens{documents}, {self.mask}, heads {self.H}/{self.Hk} of {self.D}"

    @property
    def cu(self) -> tuple[int, ...] | None:
        return tuple(sum(self.documents[:n]) for n in range(len(self.documents) + 1)) if self.documents else None

    @property
    def forward_flops(self) -> int:
        """FLOPs of the visible pairs (see `cost.flops`)."""
        bounds = (0, self.tokens) if self.cu is None else self.cu
        return 4 * self.D * self.H * sum(pairs(self.mask, b - a, b - a) for a, b in pairwise(bounds))

    def problem(self, session: Session) -> Problem:
        """The problem over the whole sequence."""
        spec = Spec(
            dtype=DTYPES[session.dtype], dim=self.D, dim_v=self.D, group=self.H // self.Hk, mask=self.mask, scale=self.D**-0.5,
            layout="packed" if self.documents else "dense", device=session.machine.arch,
        )  # fmt: skip
        lengths = tuple((n, n) for n in self.documents)
        return Problem(
            spec=spec, sizes=Sizes(B=len(lengths) or 1, T=self.tokens, S=self.tokens, H=self.H, Hk=self.Hk, lengths=lengths)
        )

    def on(self, ranks: int, itemsize: int, layout: str) -> traffic.Sequence:
        return traffic.Sequence(
            tokens=self.tokens, ranks=ranks, mask=self.mask, H=self.H, Hk=self.Hk, D=self.D, Dv=self.D, itemsize=itemsize,
            layout=layout, cu=self.cu,
        )  # fmt: skip

    def shard(self, x: Tensor, layout: str) -> Tensor:
        """This rank's tokens of q, k, v, o or a gradient."""
        return shard(x, None, x.ndim - 3, layout, None if self.cu is None else torch.tensor(self.cu))


def _layout(backend: str) -> str:
    return "balanced" if backend == BALANCED else "zigzag"


def _method(backend: str) -> str:
    return "gather" if backend == BALANCED else backend


# documents of all sizes, across every border
DOCUMENTS = (5000, 1, 127, 9000, 300, 4096, 1, 14_243)
CASES = {
    "32k": Case(tokens=32_768),
    "8k": Case(tokens=8192),
    "128k": Case(tokens=131_072),
    "128k-window-4096": Case(tokens=131_072, mask=CAUSAL & Window(4095)),
    "32k-documents": Case(tokens=sum(DOCUMENTS), documents=DOCUMENTS),
    "cpu-256": Case(tokens=256, H=4, Hk=2, D=32),
    "cpu-documents": Case(tokens=200, H=4, Hk=2, D=32, documents=(1, 120, 79)),
}
LINK = "link"
GPU = (LINK, *(name for name in CASES if not name.startswith("cpu")))
CPU = (LINK, *(name for name in CASES if name.startswith("cpu")))
QUICK = (LINK, "32k", "8k", "128k")


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """Rows of each case, on rank 0 only; every rank of the default group calls this with the same names."""
    clock = RanksClock(session.device, budget_us=150e3 if session.device.type == "cuda" else 5e3)
    rows = _Rows(session, clock, dist.get_rank() == 0, dist.get_world_size())
    for name in names:
        say(f"{name}: {rows.ranks} ranks")
        yield from (_link_rows(rows) if name == LINK else _case_rows(rows, name, CASES[name], say))
        tidy(session.device)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Makes the rows of a run, which share session, clock and ranks."""

    session: Session
    clock: RanksClock
    is_first: bool
    ranks: int

    def make(self, samples: Sequence[float], **named: Any) -> Iterator[Row]:
        if self.is_first:
            settings = {"ranks": self.ranks} | named.pop("settings", {})
            yield timed_row(
                self.session, samples, dtype=self.session.dtype, suite="context-parallel", settings=settings, **named
            )  # fmt: skip


def _link_rows(rows: _Rows) -> Iterator[Row]:
    device, P = rows.session.device, rows.ranks
    for mib in (1, 16, 256) if device.type == "cuda" else (1,):
        whole = torch.zeros(mib << 20, dtype=torch.uint8, device=device)
        got, part = torch.empty_like(whole), whole[: len(whole) // P]
        even = len(part) * P
        works: dict[str, Work] = {
            "all-gather": partial(dist.all_gather_into_tensor, got[:even], part),
            "all-to-all": partial(dist.all_to_all_single, got[:even], whole[:even]),
        }
        for name, samples in rows.clock.take_turns(works).items():
            moved = (P - 1) * len(part)
            sent = {"sent_mib": figures(moved / 2**20), "link_gbs": figures(moved / min(samples) / 1e3)}
            yield from rows.make(samples, case=f"{LINK}-{mib}-mib", backend=name, phase="transfer", measures=sent)
    found = link.measure(dist.group.WORLD, device)
    measures = {"link_gbs": found.gbs, "latency_us": found.latency_us}
    yield from rows.make([], case=LINK, backend="hardware.link", phase="transfer", measures=measures)


def _case_rows(rows: _Rows, name: str, case: Case, say: Progress) -> Iterator[Row]:
    whole, do = _inputs(case, rows.session)
    layouts = ("zigzag", "balanced") if case.documents else ("zigzag",)
    own = {layout: ([case.shard(x, layout) for x in whole], case.shard(do, layout)) for layout in layouts}
    alone: dict[str, _Call] = {"one-rooftile": lambda *x: _on_one(case, *x)}
    if case.cu is None and case.mask == CAUSAL and rows.session.device.type == "cuda":
        alone["one-cudnn"] = _cudnn
    together = {method: _split_call(case, method) for method in METHODS}
    if case.documents:
        together |= {BALANCED: _split_call(case, BALANCED)}
    if "one-cudnn" in alone:
        together |= {"torch": _sdpa, "torch-repeated": partial(_sdpa, repeats=case.H // case.Hk)}
    for phase in PHASES:
        works: dict[str, Work] = {}
        settings: dict[str, dict[str, Any]] = {}
        due: list[Tensor] | None = None
        for backend, call in (alone | together).items():
            if backend == "torch-repeated" and "torch" in works:
                continue
            say(f"{name} {phase}: {backend}")
            leaves, grad = (whole, do) if backend in alone else own[_layout(backend)]
            works[backend] = _work(call, leaves, grad, phase)
            if backend.startswith("torch"):
                works[backend] = partial(_inside, partial(_torch_context, grad.device, case.tokens), works[backend])
            found, reason = rows.clock.agree(works[backend])
            if not reason and due is None and backend in alone:
                due = found
            elif not reason and due is None:
                reason = "there is no output of one GPU to compare with"
            elif not reason and due is not None:
                parts = due if backend in alone else [case.shard(x, _layout(backend)) for x in due]
                error = rows.clock.most(max(_difference(a, b) for a, b in zip(found, parts, strict=True)))
                settings[backend] = {"difference": figures(error)}
                if backend in OURS:
                    settings[backend]["layout"] = _layout(backend)
                # not "> CLOSE": nan is wrong
                reason = "" if error <= CLOSE else f"wrong: differs from one GPU's by {error:.2g}"
            del found
            if reason:
                del works[backend]
                tidy(rows.session.device)
                yield from rows.make([], case=name, backend=backend, phase=phase, reason=reason)
        shares = {backend: kernel_shares(work, rows.session.device) for backend, work in works.items() if backend in together}
        taken = rows.clock.take_turns(works)
        yield from _timed(rows, name, case, phase, taken, shares, settings)
        del works
        tidy(rows.session.device)


def _timed(
    rows: _Rows, name: str, case: Case, phase: str, taken: dict[str, list[float]], shares: dict[str, dict[str, float]],
    settings: dict[str, dict[str, Any]],
) -> Iterator[Row]:  # fmt: skip
    best = min((min(samples) for backend, samples in taken.items() if backend.startswith("one-")), default=None)
    flops = case.forward_flops * (1 if phase == "fwd" else 3.5)
    rate = link.measure(dist.group.WORLD, rows.session.device)
    for backend, samples in taken.items():
        P = 1 if backend.startswith("one-") else rows.ranks
        middle = sorted(samples)[len(samples) // 2]
        measures = {"tflops_of_rank": figures(flops / P / middle / 1e6)}
        if P > 1 and best is not None:
            measures["scaling_ratio"] = figures(best / P / middle)
        if backend in OURS:
            method, layout = _method(backend), _layout(backend)
            sequence = case.on(P, 2 if rows.session.dtype == "bf16" else 4, layout)
            sent = sum(traffic.bytes_sent(method, sequence, each) for each in phase.split("+"))
            measures["sent_mib"] = figures(sent / 2**20)
            found = parallel.plan(
                case.problem(rows.session), P, rate, rows.session.ceilings, layout=layout, phase=phase, one_us=best
            )  # fmt: skip
            predicted = {each.method: each.time_us for each in found.estimates}
            if best is not None and method in predicted:
                measures["predicted_us"] = figures(predicted[method])
        yield from rows.make(
            samples, case=name, backend=backend, phase=phase, measures=measures | shares.get(backend, {}),
            settings=settings.get(backend, {}),
            problem=f"{case}",
        )  # fmt: skip


_Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def _inputs(case: Case, session: Session) -> tuple[list[Tensor], Tensor]:
    """q, k, v and do of the whole sequence, the same on every rank."""
    generator = torch.Generator(session.device).manual_seed(0)
    dtype = torch.bfloat16 if session.dtype == "bf16" else torch.float32
    outer = (case.tokens,) if case.documents else (1, case.tokens)

    def random(heads: int) -> Tensor:
        return torch.randn(*outer, heads, case.D, dtype=dtype, device=session.device, generator=generator)

    return [random(case.H), random(case.Hk), random(case.Hk)], random(case.H)


def _work(call: _Call, leaves: list[Tensor], do: Tensor, phase: str) -> Callable[[], list[Tensor]]:
    def alone() -> list[Tensor]:
        with torch.no_grad():
            return [call(*leaves)]

    def both() -> list[Tensor]:
        wanted = [x.detach().requires_grad_() for x in leaves]
        o = call(*wanted)
        return [o.detach(), *torch.autograd.grad(o, wanted, do)]

    return alone if phase == "fwd" else both


def _difference(x: Tensor, due: Tensor) -> float:
    return float((x.float() - due.float()).norm() / due.float().norm().clamp_min(1e-30))


def _on_one(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if case.cu is None:
        return rt.attention(q, k, v, case.mask)
    cu = torch.tensor(case.cu, dtype=torch.int32)
    return rt.attention_packed(q, k, v, cu, cu, case.mask)


def _split_call(case: Case, backend: str) -> _Call:
    cu = None if case.cu is None else torch.tensor(case.cu)
    layout, method = _layout(backend), _method(backend)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = context_attention(q, k, v, case.mask, group=None, layout=layout, method=method, tokens=case.tokens, cu=cu)
        assert isinstance(o, Tensor)
        return o

    return call


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(q, k, v)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, repeats: int = 1) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    grouped = k.shape[1] < q.shape[1]
    o: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return o.transpose(1, 2)


def _inside(context: Callable[[], AbstractContextManager[None]], work: Callable[[], list[Tensor]]) -> list[Tensor]:
    with context():
        return work()


@contextmanager
def _torch_context(device: torch.device, tokens: int) -> Iterator[None]:
    """PyTorch's context parallelism with its own balance, which deals out tokens as our zigzag does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device not in _MESHES:
        _MESHES[device] = init_device_mesh(device.type, (dist.get_world_size(),))
    # the context cuts its buffers; q, k and v are cut already
    buffer = torch.zeros(tokens, device=device)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context_parallel(
        _MESHES[device], buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}
    ):  # fmt: skip
        yield


_MESHES: dict[torch.device, Any] = {}
