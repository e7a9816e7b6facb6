"""AdamW: the bits of PyTorch's in fp32, of an fp32 master under a split one, and every way in which an optimiser is used."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rooftile as rt
from rooftile.optim import AdamW
from rooftile.optim.split import join, split

SHAPES = ((7, 3), (1,), (40, 50), (0, 4), (2, 3, 4, 5))


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def copies(params: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(dtype or p.dtype, copy=True)) for p in params]


def gradients(steps: int, dtype: torch.dtype = torch.float32) -> Iterator[list[torch.Tensor]]:
    """Gradients of very different sizes, as training has them."""
    generator = torch.Generator().manual_seed(1)
    for n in range(steps):
        yield [(torch.randn(shape, generator=generator) * 10 ** (n % 5 - 3)).to(dtype) for shape in SHAPES]


def run(optimiser: torch.optim.Optimizer, steps: Iterator[list[torch.Tensor]], *, clip: float | None = None) -> None:
    params = [p for group in optimiser.param_groups for p in group["params"]]
    for found in steps:
        for p, gradient in zip(params, found, strict=True):
            p.grad = gradient.to(p.dtype)
        if clip is not None:
            nn.utils.clip_grad_norm_(params, clip)
        optimiser.step()


@pytest.mark.parametrize("words", [{}, {"maximize": True}, {"weight_decay": 0.0, "betas": (0.0, 0.9)}, {"eps": 1e-3}], ids=str)
def test_a_thousand_steps_have_torchs_bits(words: dict) -> None:
    ours, theirs = weights(), weights()
    run(AdamW(ours, lr=1e-2, **words), gradients(1000))
    run(torch.optim.AdamW(theirs, lr=1e-2, foreach=False, **words), gradients(1000))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_clipping_has_torchs_bits_and_leaves_gradients() -> None:
    ours, theirs = weights(), weights()
    optimiser = AdamW(ours, clip_norm=np.float64(0.5))
    run(optimiser, gradients(50))
    run(torch.optim.AdamW(theirs, foreach=False), gradients(50), clip=0.5)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    last = list(gradients(50))[-1]
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(ours, last, strict=True))
    due = torch.linalg.vector_norm(torch.cat([x.flatten() for x in last]))
    torch.testing.assert_close(optimiser.grad_norm, due)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_computed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    ours = weights(dtype)
    wide = copies(ours, torch.float32)
    given = next(gradients(1, dtype))
    run(AdamW(ours, lr=0.1), iter([given]))
    run(AdamW(wide, lr=0.1), iter([given]))
    assert all(torch.equal(x, y.to(dtype)) for x, y in zip(ours, wide, strict=True))


def test_a_split_master_is_an_fp32_master_bit_for_bit() -> None:
    """Also where updates are far below a bf16 weight's last bit, which plain bf16 loses."""
    ours = weights(torch.bfloat16)
    wide, plain = copies(ours, torch.float32), copies(ours)
    optimiser = AdamW(ours, lr=1e-5, clip_norm=1.0, master="split")
    given = [[x.bfloat16().float() for x in found] for found in gradients(300)]
    run(optimiser, iter(given))
    run(AdamW(wide, lr=1e-5, clip_norm=1.0), iter(given))
    run(AdamW(plain, lr=1e-5, clip_norm=1.0), iter(given))
    for x, y in zip(ours, wide, strict=True):
        assert torch.equal(optimiser.master_weight(x), y)
        assert x.dtype == torch.bfloat16
        assert (x.float() - y).abs().max() <= y.abs().max() * 2**-8 if x.numel() else True
    assert not all(torch.equal(x, y) for x, y in zip(ours, plain, strict=True))
    assert optimiser.state[ours[2]]["rest"].dtype == torch.int16
    assert optimiser.state[ours[2]]["exp_avg"].dtype == torch.float32


def test_halves_are_exact_for_every_kind_of_number() -> None:
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).int()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.0, -1.0, 1e-45, 3.4028234663852886e38, -3.4028234663852886e38])
    ties = (torch.arange(0, 2**15, 7).int() << 16) + 0x8000
    x = torch.cat([bits.view(torch.float32), special, ties.view(torch.float32)])
    high, rest = split(x)
    joined = join(high, rest)
    lost = x.isnan()
    assert torch.equal(joined[~lost].view(torch.int32), x[~lost].view(torch.int32))
    assert joined[lost].isnan().all()
    assert high[lost].isnan().all()
    finite = x.isfinite() & high.isfinite()
    nearest = (x.double() - x.bfloat16().double()).abs()
    assert torch.equal((x.double() - high.double()).abs()[finite], nearest[finite])


def test_groups_of_mixed_dtypes_and_weights_without_gradients() -> None:
    ours, half = weights(), weights(torch.bfloat16)
    theirs = copies(ours)
    optimiser = AdamW([{"params": ours[:2], "lr": 0.1}, {"params": [*ours[2:], *half]}], master="split", weight_decay=0.1)
    peer = torch.optim.AdamW([{"params": theirs[:2], "lr": 0.1}, {"params": theirs[2:]}], weight_decay=0.1, foreach=False)
    before = half[2].detach().clone()
    for n, found in enumerate(gradients(6)):
        for x, y, z, gradient in zip(ours, theirs, half, found, strict=True):
            # some weights have no gradient at some steps, and so another count of steps
            x.grad = y.grad = None if n % 2 and x.ndim == 2 else gradient
            z.grad = None if z.ndim == 2 else gradient.bfloat16()
        optimiser.step()
        peer.step()
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert torch.equal(half[2], before)
    assert half[2] not in optimiser.state
    assert float(optimiser.state[ours[0]]["step"]) == 3
    optimiser.zero_grad()
    optimiser.step()


@pytest.mark.parametrize("master", [None, "split"])
def test_a_resumed_run_is_the_whole_run(master: str | None) -> None:
    def made(params):
        return AdamW(params, lr=1e-3, clip_norm=1.0, master=master)

    whole, first = weights(torch.bfloat16), weights(torch.bfloat16)
    run(made(whole), gradients(20))
    optimiser = made(first)
    given = list(gradients(20))
    run(optimiser, iter(given[:11]))
    saved = io.BytesIO()
    torch.save(optimiser.state_dict(), saved)
    saved.seek(0)
    second = copies(first)
    resumed = made(second)
    resumed.load_state_dict(torch.load(saved))
    run(resumed, iter(given[11:]))
    assert all(torch.equal(x, y) for x, y in zip(whole, second, strict=True))
    for clone in (copy.deepcopy(optimiser), pickle.loads(pickle.dumps(optimiser))):
        assert clone.clip_norm == 1.0
        run(clone, iter(given[11:]))
        params = clone.param_groups[0]["params"]
        assert all(torch.equal(x, y) for x, y in zip(whole, params, strict=True))


def test_states_of_torchs_adamw() -> None:
    theirs = weights()
    peer = torch.optim.AdamW(theirs, lr=1e-2, foreach=False)
    given = list(gradients(20))
    run(peer, iter(given[:9]))
    ours = copies(theirs)
    optimiser = AdamW(ours)
    optimiser.load_state_dict(peer.state_dict())
    assert optimiser.param_groups[0]["lr"] == 1e-2
    run(peer, iter(given[9:]))
    run(optimiser, iter(given[9:]))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    half = copies(theirs, torch.bfloat16)
    other = AdamW(half, master="split")
    other.load_state_dict(peer.state_dict())
    assert {"rest", "sums", "exp_avg", "exp_avg_sq", "step"} == other.state[half[0]].keys()
    assert other.state[half[0]]["exp_avg"].dtype == torch.float32
    with pytest.raises(rt.InvalidInput, match="rests of split weights and master is None"):
        AdamW(copies(half)).load_state_dict(other.state_dict())
    with pytest.raises(rt.InvalidInput, match="amsgrad=True, which is not there"):
        AdamW(copies(theirs)).load_state_dict(torch.optim.AdamW(theirs, amsgrad=True).state_dict())


def test_rates_from_schedulers_and_tensors() -> None:
    ours, theirs, third = weights(), weights(), weights()
    made = (AdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, foreach=False), AdamW(third, lr=torch.tensor(0.1)))
    for optimiser in made:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 5)
        for found in gradients(5):
            run(optimiser, iter([found]))
            schedule.step()
    for x, y, z in zip(ours, theirs, third, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, z)


def test_steps_that_are_counted_on_the_device() -> None:
    ours, theirs = weights(), weights()
    run(AdamW(ours, lr=1e-2, capturable=True), gradients(30))
    run(AdamW(theirs, lr=1e-2), gradients(30))
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


def test_a_gradient_scaler() -> None:
    ours, theirs = weights(), weights()
    made = (AdamW(ours), torch.optim.AdamW(theirs, foreach=False))
    for optimiser in made:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        params = optimiser.param_groups[0]["params"]
        for n in range(4):
            optimiser.zero_grad()
            loss = sum((p.sin() * (torch.inf if n == 2 else 1.0)).sum() for p in params)
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert float(made[0].state[ours[0]]["step"]) == 3


# torch's own, of its trace of a loss across a break of the graph
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("capturable", [False, True])
def test_a_compiled_training_step(capturable: bool) -> None:
    torch._dynamo.reset()
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    other.load_state_dict(model.state_dict())
    x = torch.randn(5, 4)

    def train(model: nn.Module, optimiser: AdamW) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss

    compiled = torch.compile(train, backend="aot_eager")
    ours, plain = AdamW(model.parameters(), capturable=capturable, clip_norm=0.1), AdamW(other.parameters(), clip_norm=0.1)
    for _ in range(3):
        torch.testing.assert_close(compiled(model, ours), train(other, plain))
    torch.testing.assert_close(model.weight, other.weight)


def test_a_closure_and_a_step_under_inference_of_others() -> None:
    w = nn.Parameter(torch.ones(3))
    optimiser = AdamW([w])

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    assert optimiser.step(closure) == 3
    strided = nn.Parameter(torch.randn(6, 8)[:, ::2])
    other = nn.Parameter(strided.detach().clone())
    for p in (strided, other):
        p.grad = torch.ones(6, 4)
        AdamW([p]).step()
    assert torch.equal(strided, other)
    channels = nn.Parameter(torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    rows = nn.Parameter(channels.detach().contiguous())
    for p in (channels, rows):
        p.grad = torch.arange(120.0).view(2, 3, 4, 5)
        AdamW([p]).step()
    assert torch.equal(channels, rows)


class Sharded(torch.Tensor):
    def to_local(self) -> torch.Tensor:
        return self


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda p: AdamW(p, amsgrad=True), rt.Unsupported, "amsgrad=True is not there; use torch.optim.AdamW"),
        (lambda p: AdamW(p, lr=-1.0), rt.InvalidInput, "lr is -1.0; must be 0 or more"),
        (lambda p: AdamW(p, lr=torch.ones(2)), rt.InvalidInput, r"lr has shape \(2,\); must be one number"),
        (lambda p: AdamW(p, lr=torch.ones(()), capturable=True), rt.InvalidInput, "put lr on the device"),
        (lambda p: AdamW(p, betas=(0.9, 1.0)), rt.InvalidInput, "betas are 0.9 and 1.0; must be from 0 to below 1"),
        (lambda p: AdamW(p, eps=-1.0), rt.InvalidInput, "eps is -1.0"),
        (lambda p: AdamW(p, weight_decay=float("nan")), rt.InvalidInput, "weight_decay is nan"),
        (lambda p: AdamW(p, clip_norm=0.0), rt.InvalidInput, "clip_norm is 0.0; must be above 0, or None"),
        (lambda p: AdamW(p, master="fp32"), rt.InvalidInput, "master is 'fp32'; must be 'split' or None"),
        (lambda p: AdamW([p[0].half()], master="split"), rt.InvalidInput, "a weight is torch.float16 and master is 'split'"),
        (lambda p: AdamW([p[0].to(torch.complex64)]), rt.InvalidInput, "a weight is torch.complex64; must be a float"),
        (lambda p: AdamW([p[0].as_subclass(Sharded)]), rt.InvalidInput, "a weight is a DTensor"),
    ],
)
def test_wrong_arguments(call, error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call([torch.ones(3)])


def test_a_group_that_is_refused_is_not_added_and_sparse_gradients_are_refused() -> None:
    optimiser = AdamW(weights())
    with pytest.raises(rt.InvalidInput):
        optimiser.add_param_group({"params": [nn.Parameter(torch.ones(2))], "eps": -1.0})
    assert len(optimiser.param_groups) == 1
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(rt.InvalidInput, match=r"a gradient is torch\.sparse_coo; must be strided"):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("master", [None, "split"])
def test_what_a_mask_leaves_out_decays(master: Any, clip_norm: float | None, maximize: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if master is None else torch.bfloat16
    masked, plain = (torch.nn.Parameter(torch.randn(6, 8).to(dtype)) for _ in range(2))
    mask = torch.rand(6, 8) < 0.5
    optimiser = AdamW([masked, plain], lr=0.1, weight_decay=0.1, clip_norm=clip_norm, maximize=maximize, master=master)
    w = masked.detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t in (1, 2, 3):
        masked.grad, plain.grad = torch.randn(6, 8).to(dtype), torch.randn(6, 8).to(dtype)
        norm = torch.cat([masked.grad.double(), plain.grad.double()]).norm()
        factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm.item() + 1e-6))
        optimiser.decay_left_out(masked, mask, 0.3)
        optimiser.step()
        # the clip sees the gradient alone
        g = masked.grad.double() * factor * (-1 if maximize else 1) + 0.3 * torch.where(mask, 0.0, w)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w * (1 - 0.1 * 0.1) - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        torch.testing.assert_close(optimiser.master_weight(masked).double(), w, rtol=1e-5, atol=1e-5)
        if clip_norm is not None:
            assert optimiser.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    # it was for these steps
    masked.grad, before = torch.zeros_like(masked), optimiser.state[masked]["exp_avg"].clone()
    optimiser.step()
    torch.testing.assert_close(optimiser.state[masked]["exp_avg"], 0.9 * before)


def test_a_mask_that_does_not_fit() -> None:
    w = torch.nn.Parameter(torch.ones(4, 4))
    wrong = (torch.ones(4, 2, dtype=torch.bool), r"torch.bool \(4, 2\)"), (torch.ones(4, 4), r"torch.float32 \(4, 4\)")
    for mask, what in wrong:
        with pytest.raises(rt.InvalidInput, match=rf"mask is {what}; must be bool \(4, 4\), as the weight"):
            AdamW([w]).decay_left_out(w, mask, 0.1)
