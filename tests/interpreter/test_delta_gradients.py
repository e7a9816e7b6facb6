"""The kernels of the gated delta rule's gradients, interpreted: against autograd through the definition in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile import recurrent
from rooftile.recurrent import walk
from tests.interpreter.test_delta import inputs
from tests.recurrent import definitions

ROOM = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _kernels_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuses the plain walk, and fills new memory with NaN."""

    def refuse(*unused: Any) -> None:
        raise AssertionError("the plain walk ran")

    monkeypatch.setattr(walk, "backward", refuse)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(run: Any, given: list[Tensor], dy: Tensor | None, d_last: Tensor | None, **options: Any) -> list[Tensor]:
    """The gradients of q, k, v, g, beta and the first state."""
    leaves = [x.detach().requires_grad_() for x in given]
    y, last = run(*leaves[:5], state=leaves[5], **options)
    pairs = [(out, d.to(out.dtype)) for out, d in ((y, dy), (last, d_last)) if d is not None]
    outputs, dues = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outputs, leaves, dues, allow_unused=True, materialize_grads=True))


def kernels(*given: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return recurrent.gated_delta(*given, backend="triton", **options)


def check(given: list[Tensor], state: Tensor, *, y: bool = True, last: bool = True, **options: Any) -> list[Tensor]:
    tensors, dtype = [*given, state], given[0].dtype
    dy, d_last = torch.randn_like(given[2]) if y else None, torch.randn_like(state) if last else None
    found = gradients(kernels, tensors, dy, d_last, **options)
    wide = [None if d is None else d.double() for d in (dy, d_last)]
    due = gradients(definitions.gated_delta, [x.double() for x in tensors], *wide, **options)
    for x, a, b in zip(tensors, found, due, strict=True):
        assert (a.dtype, a.shape) == (x.dtype, x.shape)
        if b.numel():
            assert float((a.double() - b).abs().max()) <= ROOM[dtype] * max(float(b.abs().max()), 0.1)
    return found


@pytest.mark.parametrize(
    ("T", "Hk", "Hv", "Dk", "Dv", "dtype", "decay"),
    [
        (1, 1, 2, 8, 4, torch.float32, 1.0),
        (2, 2, 2, 1, 1, torch.float32, 1.0),
        (3, 1, 2, 8, 4, torch.bfloat16, 1.0),
        (63, 2, 2, 24, 40, torch.bfloat16, 0.1),
        (64, 1, 3, 16, 16, torch.float32, 0.1),
        (65, 1, 2, 5, 7, torch.float16, 0.5),
        (130, 1, 2, 32, 65, torch.float32, 0.05),
        (70, 1, 1, 128, 128, torch.bfloat16, 0.05),
        (130, 1, 1, 16, 16, torch.float32, 500.0),
    ],
    ids=str,
)
def test_gradients_are_the_definitions(
    T: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: torch.dtype, decay: float
) -> None:  # fmt: skip
    check(inputs((2, T), Hk, Hv, Dk, Dv, dtype, decay), torch.randn(2, Hv, Dk, Dv))


def test_no_token() -> None:
    given, state = inputs((2, 0), 1, 2, 8, 4, torch.float32), torch.randn(2, 2, 8, 4)
    d_last = torch.randn_like(state)
    found = gradients(kernels, [*given, state], None, d_last)
    assert [x.shape for x in found[:5]] == [x.shape for x in given]
    assert torch.equal(found[5], d_last)


def test_packed_sequences_and_a_scale() -> None:
    lengths = [3, 0, 71, 1, 64, 0]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    given = inputs((sum(lengths),), 2, 4, 8, 6, torch.float32)
    given[1] = given[1] / given[1].norm(dim=-1, keepdim=True)
    check(given, torch.randn(6, 4, 8, 6), cu=cu, scale=0.3, qk_norm=False)


@pytest.mark.parametrize(("y", "last"), [(True, False), (False, True)])
def test_one_output_alone(y: bool, last: bool) -> None:
    check(inputs((1, 70), 1, 2, 8, 6, torch.float32), torch.randn(1, 2, 8, 6), y=y, last=last)


def test_equal_keys_and_full_writes() -> None:
    """The system is as far from the identity as it can be."""
    given = inputs((1, 130), 1, 1, 16, 16, torch.float32, 0.0)
    given[1] = given[1][:, :1].expand_as(given[1]).contiguous()
    given[4] = torch.ones_like(given[4])
    check(given, torch.randn(1, 1, 16, 16))


def test_nothing_is_written_where_beta_is_zero() -> None:
    given = inputs((1, 70), 1, 2, 8, 8, torch.float32)
    given[4][:, ::3] = 0
    assert float(check(given, torch.randn(1, 2, 8, 8))[4][:, ::3].abs().min()) > 0


def test_small_exponents_behind_a_large_one() -> None:
    given = inputs((1, 60), 1, 1, 16, 16, torch.float32, 0.01)
    given[3][:, 3] = -1e5
    check(given, torch.randn(1, 1, 16, 16))


def test_strides_and_gradients_that_are_repeated() -> None:
    given, state = inputs((2, 70), 1, 2, 16, 8, torch.float32), torch.randn(2, 2, 16, 8)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    apart[2] = given[2].repeat_interleave(2, -1)[..., ::2]
    one = torch.randn(1, 1, 1, 8)
    found = gradients(kernels, [*apart, state.transpose(2, 3).contiguous().transpose(2, 3)], one.expand(2, 70, 2, 8), state.mT.mT)
    due = gradients(kernels, [*given, state], one.expand(2, 70, 2, 8).contiguous(), state)
    for a, b in zip(found, due, strict=True):
        assert torch.equal(a, b)


def test_no_token_knows_earlier_ones_or_neighbours() -> None:
    """An output's gradient reaches the tokens until it, and its own sequence."""
    given, state = inputs((2, 100), 1, 2, 16, 8, torch.float32), torch.randn(2, 2, 16, 8)
    dy = torch.zeros(2, 100, 2, 8)
    dy[0, :40] = torch.randn(40, 2, 8)
    found = gradients(kernels, [*given, state], dy, None)
    for x in found[:5]:
        assert not x[1].any()
        assert not x[0, 40:].any()
        assert x[0, :40].any()
    assert not found[5][1].any()


def test_the_delta_rule_without_decay_is_delta_net() -> None:
    """With g = 0 and one write, dv is beta times what later queries take of the key."""
    given = inputs((1, 9), 1, 1, 8, 8, torch.float32, 0.0)
    given[4][:, 1:] = 0
    state, dy = torch.zeros(1, 1, 8, 8), torch.randn(1, 9, 1, 8)
    found = gradients(kernels, [*given, state], dy, None)
    q, k = (x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt() for x in given[:2])
    weights = (q[0, :, 0] @ k[0, 0, 0]) * 8**-0.5
    torch.testing.assert_close(found[2][0, 0, 0], given[4][0, 0, 0] * (weights @ dy[0, :, 0]), rtol=1e-4, atol=1e-5)
    assert not found[2][0, 1:].any()
