"""The gated delta rule's kernels, interpreted: against the definition in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import recurrent
from rooftile.recurrent.delta import OPERATORS
from tests.recurrent import definitions

ROOM = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def inputs(front: tuple[int, ...], Hk: int, Hv: int, Dk: int, Dv: int, dtype: torch.dtype, decay: float = 1.0) -> list[Tensor]:
    q, k, v = (torch.randn(*front, h, d).to(dtype) for h, d in ((Hk, Dk), (Hk, Dk), (Hv, Dv)))
    return [q, k, v, -decay * torch.rand(*front, Hv), torch.rand(*front, Hv)]


def due_of(given: list[Tensor], **options) -> tuple[Tensor, Tensor]:
    options = {n: x.double() if isinstance(x, Tensor) and n == "state" else x for n, x in options.items()}
    return definitions.gated_delta(*(x.double() for x in given), **options)


def assert_near(found: Tensor, due: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == due.shape
    if due.numel():
        assert float((found.double() - due).abs().max()) <= ROOM[dtype] * max(float(due.abs().max()), 0.1)


@pytest.mark.parametrize(
    ("T", "Hk", "Hv", "Dk", "Dv", "dtype", "decay"),
    [
        (0, 1, 2, 8, 8, torch.float32, 1.0),
        (1, 1, 2, 8, 4, torch.float32, 1.0),
        (63, 2, 2, 24, 40, torch.bfloat16, 0.1),
        (64, 1, 3, 16, 16, torch.float32, 0.1),
        (65, 1, 2, 5, 7, torch.float16, 0.5),
        (150, 1, 2, 32, 65, torch.float32, 0.05),
        (150, 1, 1, 128, 128, torch.bfloat16, 0.05),
        (130, 1, 1, 16, 16, torch.float32, 500.0),
    ],
    ids=str,
)
def test_kernels_equal_the_definition(
    T: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: torch.dtype, decay: float
) -> None:  # fmt: skip
    given, state = inputs((2, T), Hk, Hv, Dk, Dv, dtype, decay), torch.randn(2, Hv, Dk, Dv)
    y, last = recurrent.gated_delta(*given, state=state, backend="triton")
    y_due, last_due = due_of(given, state=state)
    assert (y.dtype, last.dtype) == (dtype, torch.float32)
    assert_near(y, y_due, dtype)
    assert_near(last, last_due, dtype)


def test_packed_sequences_and_a_scale() -> None:
    lengths = [3, 0, 71, 1, 128, 0]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    given, state = inputs((sum(lengths),), 2, 4, 8, 6, torch.float32), torch.randn(6, 4, 8, 6)
    given[1] = given[1] / given[1].norm(dim=-1, keepdim=True)
    y, last = recurrent.gated_delta(*given, state=state, cu=cu, scale=0.3, qk_norm=False, backend="triton")
    y_due, last_due = due_of(given, state=state, cu=cu, scale=0.3, qk_norm=False)
    assert_near(y, y_due, torch.float32)
    assert_near(last, last_due, torch.float32)


def test_no_packed_sequence() -> None:
    given = inputs((0,), 1, 2, 8, 8, torch.float32)
    y, last = recurrent.gated_delta(*given, cu=torch.zeros(1, dtype=torch.int32), backend="triton")
    assert (y.shape, last.shape) == ((0, 2, 8), (0, 2, 8, 8))


def test_equal_keys_and_full_writes() -> None:
    """The system is as far from the identity as it can be."""
    given = inputs((1, 150), 1, 1, 16, 16, torch.float32, 0.0)
    given[1] = given[1][:, :1].expand_as(given[1])
    given[4] = torch.ones_like(given[4])
    y, last = recurrent.gated_delta(*given, backend="triton")
    y_due, last_due = due_of(given)
    assert_near(y, y_due, torch.float32)
    assert_near(last, last_due, torch.float32)


def test_small_exponents_behind_a_large_one() -> None:
    given = inputs((1, 60), 1, 1, 16, 16, torch.float32, 0.01)
    given[3][:, 3] = -1e5
    y, _ = recurrent.gated_delta(*given, backend="triton")
    assert_near(y, due_of(given)[0], torch.float32)


def test_strides_and_repeats() -> None:
    q, k, v, g, beta = inputs((2, 70), 1, 2, 16, 8, torch.float32)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g, beta)]
    apart[2] = v.repeat_interleave(2, -1)[..., ::2]
    found, due = (recurrent.gated_delta(*x, backend="triton") for x in (apart, (q, k, v, g, beta)))
    assert torch.equal(found[0], due[0])
    assert torch.equal(found[1], due[1])


def test_no_token_knows_later_ones_or_neighbours() -> None:
    given = inputs((2, 100), 1, 2, 16, 8, torch.float32)
    due = recurrent.gated_delta(*given, backend="triton", return_state=False)
    for x in given[:3]:
        x[0, 70:] = 50 * torch.randn_like(x[0, 70:])
    found = recurrent.gated_delta(*given, backend="triton", return_state=False)
    assert torch.equal(found[0, :70], due[0, :70])
    assert torch.equal(found[1], due[1])
    assert not torch.equal(found[0, 70:], due[0, 70:])


@pytest.mark.parametrize("dtype", ROOM, ids=str)
def test_step(dtype: torch.dtype) -> None:
    given = inputs((3,), 2, 4, 24, 40, dtype)
    given[2] = given[2].repeat_interleave(2, -1)[..., ::2]
    pool = torch.randn(5, 4, 40, 24).to(dtype).transpose(2, 3)
    before, slots = pool.clone(), torch.tensor([4, 0, 3], dtype=torch.int32)
    assert OPERATORS._step_in_kernels(given, (), pool, (1.0, True))
    y = recurrent.gated_delta_step(pool, *given, slots=slots)
    y_due, last_due = due_of([x[:, None] for x in given], state=before[slots.long()])
    assert_near(y, y_due[:, 0], dtype)
    assert_near(pool[slots.long()], last_due, dtype)
    assert torch.equal(pool[[1, 2]], before[[1, 2]])
    own = before[:3].clone()
    assert_near(recurrent.gated_delta_step(own, *given), due_of([x[:, None] for x in given], state=before[:3])[0][:, 0], dtype)


def test_gradients_behind_the_kernels() -> None:
    given = [x.requires_grad_() for x in inputs((1, 70), 1, 2, 8, 8, torch.float32)]
    found, due = (
        torch.autograd.grad(recurrent.gated_delta(*given, backend=backend, return_state=False).square().sum(), given)
        for backend in ("triton", "eager")
    )
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: torch.zeros(1, 4, 2, 8)}, "g for each channel; the kernels have g for each head"),
        ({0: torch.zeros(1, 4, 2, 130), 1: torch.zeros(1, 4, 2, 130)}, "head dims 130, 8; the kernels have 1 to 128"),
    ],
)
def test_the_kernels_refuse_in_words(change: dict[int, Tensor], message: str) -> None:
    given = [change.get(n, x) for n, x in enumerate(inputs((1, 4), 2, 2, 8, 8, torch.float32))]
    with pytest.raises(rt.Unsupported, match=message):
        recurrent.gated_delta(*given, backend="triton")
