"""The kernels of Mamba-2's recurrence in Gluon, run in Python: the outputs against the definition, gradients against formulas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rooftile import recurrent as rec

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from rooftile.recurrent.kernels.state_space import call as call_module  # noqa: E402
from rooftile.recurrent.kernels.state_space import gradients_hopper, launch_hopper, outputs_hopper  # noqa: E402
from rooftile.recurrent.kernels.state_space.call import Call  # noqa: E402
from tests.kernels.emulated_copies import compiled_copies, emulate_copies, record  # noqa: E402
from tests.kernels.test_sampling_compiles import stack  # noqa: E402
from tests.kernels.test_state_space_compiles import ROOM  # noqa: E402


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kernels = (outputs_hopper._outputs_of_pairs, gradients_hopper._chunk_gradients)
    made = (launch_hopper._outputs_kernel, launch_hopper._gradients_kernel)
    # launches of kernels that are not emulated, and of other sizes
    monkeypatch.setattr(call_module, "_known", {})
    yield from emulate_copies(monkeypatch, (outputs_hopper, gradients_hopper), kernels, made, Shape=record("N", "SKIP"))


def prepared(call: Call, tokens: tuple[Tensor, ...], rates: Tensor) -> None:
    """Steps, sums of exponents and C B^T, as the kernels before this one write them."""
    _, dt, B, C = tokens
    batch, T, H = dt.shape
    segments, chunks = call.slots // batch, call.chunks

    def cut(x: Tensor) -> Tensor:
        padded = torch.zeros(batch, segments * call.size, *x.shape[2:])
        padded[:, :T] = x.float()
        return padded.view(call.slots, chunks, 64, *x.shape[2:])

    step = cut(torch.nn.functional.softplus(dt.float()))
    step.view(batch, -1, H)[:, T:] = 0
    total = (step.double() * rates.double() * torch.log2(torch.tensor(torch.e, dtype=torch.float64))).cumsum(2).float()
    call.steps = torch.stack([x.permute(3, 0, 1, 2).reshape(H, call.slots, call.size) for x in (step, total)]).contiguous()
    call.cb = torch.einsum("sctgn,scugn->scgtu", cut(C), cut(B)).to(torch.bfloat16).contiguous()


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("batch", "T", "N", "G", "size"), [(2, 130, 128, 2, 64), (1, 200, 64, 1, 128), (3, 61, 128, 1, 64)])
def test_the_walk_equals_the_definition(batch: int, T: int, N: int, G: int, size: int) -> None:
    torch.manual_seed(0)
    H, P = 4, 64
    x, dt, B, C = (torch.randn(batch, T, *rest).bfloat16() for rest in ((H, P), (H,), (G, N), (G, N)))
    A, D, state = -torch.rand(H) * 4, torch.randn(H), torch.randn(batch, H, P, N)
    call = Call((x, dt, B, C, None), (A, D, None), state, None, (True, 0.0, float("inf")))
    assert call.copies
    # segments of the test's own
    call.size, call.slots, call.chunks, call.whole = size, -(-T // size) * batch, size // 64, size >= T
    prepared(call, (x, dt, B, C), A)

    def defined(until: int) -> tuple[Tensor, Tensor]:
        tokens = [each[:, :until].double() for each in (x, dt)], [each[:, :until].double() for each in (B, C)]
        found = rec.ssd(*tokens[0], A.double(), *tokens[1], D=D.double(), state=state.double(), backend="eager")
        return found[0], found[1].float()

    starts = state if call.whole else torch.stack([defined(t)[1] if t else state for t in range(0, T, size)], 1).flatten(0, 1)
    y, last = torch.full_like(x, float("nan")), torch.full_like(state, float("nan"))
    launch_hopper.write_outputs(call, starts.contiguous(), y, last)
    due, due_last = defined(T)
    assert (y.double() - due).norm() <= 8e-3 * due.norm()
    assert (last - due_last).norm() <= 8e-3 * due_last.norm()


@pytest.mark.usefixtures("_emulated")
def test_nothing_is_read_or_written_outside_of_a_sequence() -> None:
    """A sequence whose last chunk is not full leaves the next one's rows alone."""
    T, H, N = 70, 2, 64
    x, B, C = (torch.full((2, T, *rest), 1.0).bfloat16() for rest in ((H, 64), (1, N), (1, N)))
    x[1] = float("nan")
    dt, A, state = torch.ones(2, T, H), -torch.ones(H), torch.zeros(2, H, 64, N)
    call = Call((x, dt, B, C, None), (A, None, None), state, None, (True, 0.0, float("inf")))
    prepared(call, (x, dt, B, C), A)
    y, last = torch.empty_like(x), torch.empty_like(state)
    launch_hopper.write_outputs(call, state, y, last)
    assert y[0].isfinite().all()
    assert last[0].isfinite().all()
    assert y[1].isnan().all()


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize(("batch", "T", "N", "G", "D"), [(2, 130, 128, 2, True), (1, 61, 64, 1, False), (1, 192, 128, 1, True)])
def test_gradients_of_a_chunk_equal_their_formulas(batch: int, T: int, N: int, G: int, D: bool) -> None:
    torch.manual_seed(0)
    H, P, span = 6, 64, 2
    x, g, dt, B, C = (torch.randn(batch, T, *rest).bfloat16() for rest in ((H, P), (H, P), (H,), (G, N), (G, N)))
    A, skip = -torch.rand(H) * 4, torch.randn(H) if D else None
    call = Call((x, dt, B, C, None), (A, skip, None), torch.zeros(batch, H, P, N), None, (True, 0.0, float("inf")), g)
    prepared(call, (x, dt, B, C), A)
    cells, spans = call.slots * call.chunks, -(-(H // G) // span)
    S, Q = (torch.randn(cells, H, P, N).bfloat16() for _ in range(2))
    nan = float("nan")
    dx, of_skip, d_cb = torch.full_like(x, nan), torch.full((cells, H, 64), nan), torch.full((spans, cells, G, 64, 64), nan)
    maps, of_tokens = torch.full((2, spans, cells, G, 64, N), nan), torch.full((4, H, call.slots, call.size), nan)
    through = torch.full((H, call.slots, call.chunks, 64), nan)
    launch_hopper.write_gradients(call, g, S, Q, span, dx, of_skip, d_cb, maps, (*of_tokens, through))

    def cut(one: Tensor) -> Tensor:
        padded = torch.zeros(batch, call.chunks * 64, *one.shape[2:], dtype=torch.float64)
        padded[:, :T] = one.double()
        return padded.view(cells, 64, *one.shape[2:])

    X, Gy = cut(x), cut(g)
    Bh, Ch = (cut(one).repeat_interleave(H // G, 2) for one in (B, C))
    d, e = (one.double().reshape(H, cells, 64).permute(1, 2, 0) for one in call.steps)
    cb = call.cb.double().view(cells, G, 64, 64).repeat_interleave(H // G, 1)
    lower = torch.ones(64, 64, dtype=torch.bool).tril()[None, :, :, None]
    L = torch.where(lower, e[:, :, None] - e[:, None], -torch.inf).exp2().permute(0, 3, 1, 2)
    left = (e[:, -1:] - e).exp2()
    S, Q = S.double(), Q.double()
    pairs = torch.einsum("cthp,cshp->chts", Gy, X)
    M = pairs * cb * L
    due_dx = torch.einsum("chts,cthp->cshp", cb * L, Gy) + left[..., None] * torch.einsum("cshn,chpn->cshp", Bh, Q)
    due_dx *= d[..., None]
    if skip is not None:
        due_dx += skip[:, None] * Gy
    passing = M * d.permute(0, 2, 1)[:, :, None]
    # the pairs of the tokens before r with r and the tokens after it
    own = torch.stack([passing[:, :, r:, :r].sum((2, 3)) for r in range(64)], -1)
    read = e.exp2()[..., None] * torch.einsum("cthp,chpn->cthn", Gy, S)
    moved = left[..., None] * torch.einsum("cshp,chpn->cshn", X, Q)

    def of_spans(one: Tensor, dim: int) -> Tensor:
        """Sums over the heads of a span, (spans, cells, G, ...)."""
        one = one.movedim(dim, 1).unflatten(1, (G, H // G))
        return torch.stack([one[:, :, n * span : (n + 1) * span].sum(2) for n in range(spans)])

    due = {
        "dx": (cut(dx), due_dx), "d_cb": (d_cb, of_spans(pairs * L * d.permute(0, 2, 1)[:, :, None], 1)),
        "dB": (maps[0], of_spans(moved * d[..., None], 2)), "dC": (maps[1], of_spans(read, 2)),
        "to_step": (of_tokens[0], M.sum(2)), "own": (of_tokens[1], own), "read": (of_tokens[2], (read * Ch).sum(-1).mT),
        "moved": (of_tokens[3], (moved * Bh).sum(-1).mT), "through": (through.sum(-1), (S * Q).sum((2, 3)) * e[:, -1].exp2()),
    }  # fmt: skip
    if skip is not None:
        due["dD"] = of_skip.sum(-1), (X * Gy).sum((1, 3))
    for name, (found, right) in due.items():
        if name in ("to_step", "own", "read", "moved", "through"):
            right = right.movedim(0, 1)
        error = (found.double().reshape(right.shape) - right).norm() / right.norm()
        assert error <= 8e-3, (name, float(error))


@pytest.mark.parametrize(("N", "skip", "one"), [(64, True, False), (64, False, False), (128, True, False), (128, False, True)])
@pytest.mark.parametrize("name", ["_outputs_of_pairs", "_chunk_gradients"])
def test_compiles_for_hopper(name: str, N: int, skip: bool, one: bool) -> None:
    """With `one` slot, of which Triton makes a constant, which has no methods."""
    made, kernel = (
        (launch_hopper._outputs_kernel(N), outputs_hopper._outputs_of_pairs) if name == "_outputs_of_pairs"
        else (launch_hopper._gradients_kernel(N), gradients_hopper._chunk_gradients)
    )  # fmt: skip
    registers = launch_hopper.OUTPUTS if name == "_outputs_of_pairs" else launch_hopper.GRADIENTS
    constants = launch_hopper._constants(80, 80, N, skip, WHOLE=False, SPAN=20, **registers)
    built = compiled_copies(kernel, made, constants | ({"slots": 1} if one else {}), d_strides=("i32", "i32"))
    assert built.asm["ptx"].count("wgmma.mma_async") >= 2 * (3 if name == "_outputs_of_pairs" else 4)
    # addresses, and some sums that are read once a head
    assert stack(built) <= max(ROOM, 0 if name == "_outputs_of_pairs" else 100)
    assert built.metadata.shared <= 227 * 1024
