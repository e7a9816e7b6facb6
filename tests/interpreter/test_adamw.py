"""The kernel of AdamW, interpreted, beside its definition."""

from __future__ import annotations

import pytest
import torch

from rooftile.optim import AdamW, operator
from rooftile.optim.definition import StepNumbers, update
from rooftile.optim.split import join, sums_of
from rooftile.runtime import launch

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
SHAPES = ((5, 3), (1,), (130, 140), (0, 2))


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("dtype", "split"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)]
)
def test_a_step(dtype: torch.dtype, split: bool, gradient: torch.dtype, counted: bool, sparse: bool) -> None:
    torch.manual_seed(0)
    moment = torch.float32 if split else dtype
    weights, gradients = tensors(dtype), tensors(gradient)
    first, second = tensors(moment), [x.abs() for x in tensors(moment)]
    rests = [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16) for shape in SHAPES] if split else []
    steps = [torch.tensor(3.0) for _ in SHAPES] if counted else []
    # the second weight was changed by somebody else
    sums = [sums_of(x) + (n == 1) for n, x in enumerate(weights)] if split else []
    masks = [torch.rand(shape) < 0.5 for shape in SHAPES] if sparse else []
    for lr, clip, maximize in ((None, None, False), (torch.tensor(0.02), torch.tensor(0.3), True)):
        numbers = StepNumbers(0.01, 0.9, 0.999, 1e-8, 0.1, 0.0 if counted else 3.0, 0.5)
        ours = [[x.clone() for x in each] for each in (weights, first, second, rests, sums)]
        due = [[x.clone() for x in each] for each in (weights, first, second, rests, sums)]
        seen: list[str] = []
        with launch.observe(seen.append):
            operator.step(ours[0], gradients, *ours[1:], steps, masks, lr, clip, numbers, maximize)
        assert seen == ["_adamw"]
        for n in range(len(SHAPES)):
            rest, own, step, mask = (each[n] if each else None for each in (due[3], due[4], steps, masks))
            update(due[0][n], gradients[n], due[1][n], due[2][n], rest, own, step, lr, clip, numbers, maximize, mask)
            for x, y in zip(ours[:3], due[:3], strict=True):
                torch.testing.assert_close(x[n], y[n], rtol=2 * torch.finfo(x[n].dtype).eps, atol=1e-7)
            if split:
                torch.testing.assert_close(join(ours[0][n], ours[3][n]), join(due[0][n], due[3][n]), rtol=1e-6, atol=1e-7)
                assert torch.equal(ours[4][n], sums_of(ours[0][n]))


def test_a_training_run_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(x) for x in tensors(torch.float32)]
    theirs = [torch.nn.Parameter(x.detach().clone()) for x in ours]
    made = AdamW(ours, lr=1e-2, clip_norm=1.0), torch.optim.AdamW(theirs, lr=1e-2, foreach=False)
    for _ in range(5):
        for x, y in zip(ours, theirs, strict=True):
            x.grad = torch.randn_like(x)
            y.grad = x.grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        for optimiser in made:
            optimiser.step()
    for x, y in zip(ours, theirs, strict=True):
        # within one unit in the last place for each step
        torch.testing.assert_close(x, y, rtol=5 * 2**-23, atol=5 * 2**-24)


def test_a_nan_stays_and_a_table_is_made_once() -> None:
    from rooftile.optim import adamw_kernels

    w = torch.nn.Parameter(torch.tensor([1.0, torch.nan, 3.0]).bfloat16())
    w.grad = torch.tensor([1.0, 1.0, torch.nan]).bfloat16()
    optimiser = AdamW([w], master="split")
    adamw_kernels._tables.clear()
    for _ in range(3):
        optimiser.step()
    assert len(adamw_kernels._tables) == 1
    assert w.isnan().tolist() == [False, True, True]
