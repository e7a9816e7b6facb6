"""2:4 weights in training: SR-STE by its formula, masks that are refreshed, frozen and resumed, and what is converted."""

from __future__ import annotations

import copy
import io
import math
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rooftile as rt
from rooftile.errors import InvalidInput
from rooftile.weights.two_four import Recipe, two_four
from tests.qat.models import inputs, mlp

# torch.compile calls what torch deprecates
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
DECAY = 0.5
TRANSPOSABLE = [False, True]


def small(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).to(dtype)


def sparse(format: Any = None, seed: int = 0, dtype: torch.dtype = torch.float32, **recipe: Any) -> nn.Sequential:
    return rt.qat.prepare(small(seed, dtype), format, sparsity=Recipe(**{"decay": DECAY} | recipe))


def data(rows: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(model: nn.Module, optimiser: torch.optim.Optimizer, seed: int = 0) -> float:
    loss = model(data(seed=seed)).square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    return loss.item()


class Still(torch.optim.Optimizer):
    """Changes nothing."""

    def step(self, closure: Any = None) -> None:
        """Leaves all weights."""


@pytest.mark.parametrize("transposable", TRANSPOSABLE)
def test_the_forward_and_the_gradients_by_their_formulas(transposable: bool) -> None:
    model, x = sparse(dtype=torch.float64, transposable=transposable), data(dtype=torch.float64).requires_grad_()
    first, _, second = model
    masks = [two_four(layer.weight, transposable) for layer in (first, second)]
    weights = [(layer.weight.detach() * mask).requires_grad_() for layer, mask in zip((first, second), masks, strict=True)]
    due_x = x.detach().clone().requires_grad_()
    hidden = functional.gelu(functional.linear(due_x, weights[0], first.bias))
    due = functional.linear(hidden, weights[1], second.bias)
    found = model(x)
    torch.testing.assert_close(found, due)
    found.square().sum().backward()
    due.square().sum().backward()
    torch.testing.assert_close(x.grad, due_x.grad)
    # the gradient of what is kept passes to all of the weight; the decay waits for the optimiser
    for layer, weight in zip((first, second), weights, strict=True):
        torch.testing.assert_close(layer.weight.grad, weight.grad)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("transposable", TRANSPOSABLE)
def test_the_decay_is_added_before_the_optimiser(transposable: bool, maximize: bool) -> None:
    model = sparse(transposable=transposable)
    model(data()).square().mean().backward()
    layer, sign = model[0], -1 if maximize else 1
    w, gradient, mask = layer.parameter.detach().clone(), layer.weight.grad.clone(), two_four(layer.parameter, transposable)
    torch.optim.SGD(model.parameters(), lr=0.25, maximize=maximize).step()
    due = w - 0.25 * (sign * gradient + DECAY * (~mask) * w)
    torch.testing.assert_close(layer.parameter.detach(), due)


def test_rooftiles_optimiser_takes_the_decay_too() -> None:
    models = [sparse(), sparse()]
    torchs = torch.optim.AdamW(models[0].parameters(), lr=1e-2, foreach=False)
    optimisers = [torchs, rt.optim.AdamW(models[1].parameters(), lr=1e-2)]
    for n in range(3):
        losses = [step(model, optimiser, n) for model, optimiser in zip(models, optimisers, strict=True)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    torch.testing.assert_close(models[0][0].weight, models[1][0].weight)


def test_micro_batches_and_checkpointing_equal_one_batch() -> None:
    models = [sparse() for _ in range(3)]
    for model, parts in zip(models, (1, 4, 1), strict=True):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in data(16).split(16 // parts):
            y = checkpoint(model, part, use_reentrant=False) if model is models[2] else model(part)
            (y.square().mean() / parts).backward()
        optimiser.step()
    for other in models[1:]:
        torch.testing.assert_close(other[0].weight, models[0][0].weight)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("maximize", [False, True])
def test_our_adamw_decays_in_its_pass(maximize: bool, clip_norm: float | None, parts: int) -> None:
    models = [sparse(), sparse()]
    options: dict[str, Any] = {"lr": 0.01, "maximize": maximize}
    theirs = torch.optim.AdamW(models[0].parameters(), **options, foreach=False)
    ours = rt.optim.AdamW(models[1].parameters(), **options, clip_norm=clip_norm)
    for n in range(4):
        for model in models:
            for part in data(16, seed=n).split(16 // parts):
                (model(part).square().mean() / parts).backward()
        before = models[1][0].weight.grad.clone()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(models[0].parameters(), clip_norm)
        theirs.step()
        ours.step()
        # nothing was added to the gradient itself
        assert torch.equal(models[1][0].weight.grad, before)
        assert not torch.equal(models[0][0].weight.grad, before)
        for model in models:
            model.zero_grad()
    for x, y in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if clip_norm is None:
            assert torch.equal(x, y)
        else:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a.mask, b.mask) for a, b in zip(models[0][::2], models[1][::2], strict=True))


@pytest.mark.parametrize("made", [torch.optim.SGD, rt.optim.AdamW])
def test_a_closure_gets_the_decay_after_it_computed_gradients(made: Any) -> None:
    models = [sparse(), sparse()]
    optimisers = [made(model.parameters(), lr=0.1) for model in models]
    for n in range(2):
        step(models[0], optimisers[0], n)

        def closure(n: int = n) -> Tensor:
            optimisers[1].zero_grad()
            loss = models[1](data(seed=n)).square().mean()
            loss.backward()
            return loss

        assert optimisers[1].step(closure) is not None
    torch.testing.assert_close(models[0][0].weight, models[1][0].weight)


def test_a_scaled_gradient_gets_a_scaled_decay() -> None:
    model = sparse()
    model(data()).square().mean().backward()
    layer = model[0]
    optimiser = Still(model.parameters(), {})
    gradient, due = layer.weight.grad.clone(), (~layer.mask) * layer.parameter.detach() * DECAY * 8
    # torch.amp.GradScaler sets this for an optimiser that unscales in its own kernel
    optimiser.grad_scale = torch.tensor(8.0)
    optimiser.step()
    torch.testing.assert_close(layer.weight.grad, gradient + due)


def test_layers_that_share_a_weight_decay_it_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    rt.qat.prepare(model, None, sparsity=Recipe(decay=DECAY))
    w = model[0].parameter.detach().clone()
    model(torch.randn(3, 16)).sum().backward()
    gradient = model[0].weight.grad.clone()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.testing.assert_close(model[0].parameter.detach(), w - gradient - DECAY * (~two_four(w)) * w)
    seen: list[Tensor] = []
    optimiser = rt.optim.AdamW(model.parameters())
    optimiser.decay_left_out = lambda weight, mask, decay: seen.append(weight)
    optimiser.step()
    assert len(seen) == 1


def test_masks_are_chosen_anew_and_flips_counted() -> None:
    model = sparse(decay=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=20.0)
    layer = model[0]
    assert rt.qat.status(model).layers[0].flips == 0.0
    for n in range(3):
        before = layer.mask.clone()
        step(model, optimiser, n)
        model(data())
        assert torch.equal(layer.mask, two_four(layer.parameter))
        flips = float((layer.mask != before).float().mean())
        # a second micro-batch, or a look at it, changes nothing
        model(data())
        assert rt.qat.status(model).layers[0].flips == pytest.approx(flips)
        assert flips > 0
    text = str(rt.qat.status(model))
    assert "2:4" in text
    assert f"{flips:.2%}" in text


def test_masks_stay_between_refreshes_and_when_they_are_frozen() -> None:
    model = sparse(refresh=2, freeze_from=6, decay=0)
    optimiser = torch.optim.SGD(model.parameters(), lr=20.0)
    masks = []
    for n in range(8):
        step(model, optimiser, n)
        masks.append(model[0].mask.clone())
    changed = [not torch.equal(a, b) for a, b in pairwise(masks)]
    # masks[n] is that of n + 1 steps: chosen anew after 2 and 4, and not from step 6 on
    assert changed == [True, False, True, False, False, False, False]
    model(data())
    assert torch.equal(model[0].mask, masks[3])


def test_a_mask_follows_a_weight_that_is_loaded_or_changed_by_hand() -> None:
    model, other = sparse(), small(seed=3)
    model(data())
    model.load_state_dict(other.state_dict())
    # before the next forward: a compiled one takes what it finds
    assert torch.equal(model[0].mask, two_four(other[0].weight))
    with torch.no_grad():
        model[0].weight.neg_().add_(0.1)
        model(data())
    assert torch.equal(model[0].mask, two_four(model[0].parameter))


@pytest.mark.parametrize("recipe", [{}, {"refresh": 3}, {"refresh": 2, "freeze_from": 3}], ids=str)
def test_a_run_is_resumed_with_the_same_masks(recipe: dict[str, Any]) -> None:
    def run(model: nn.Module, optimiser: torch.optim.Optimizer, steps: range) -> list[float]:
        return [step(model, optimiser, n) for n in steps]

    whole = sparse(**recipe)
    optimiser = torch.optim.AdamW(whole.parameters(), lr=0.05)
    run(whole, optimiser, range(4))
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "qat": rt.qat.state_dict(whole), "optimiser": optimiser.state_dict()}, file)
    due = run(whole, optimiser, range(4, 8))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["model"].keys() == small().state_dict().keys()
    resumed = sparse(seed=9, **recipe)
    optimiser = torch.optim.AdamW(resumed.parameters(), lr=0.05)
    resumed.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    rt.qat.load_state_dict(resumed, saved["qat"])
    assert run(resumed, optimiser, range(4, 8)) == due
    assert torch.equal(resumed[0].mask, whole[0].mask)
    assert resumed[0].qat.steps == 8


def test_states_that_do_not_fit() -> None:
    model = sparse()
    state = rt.qat.state_dict(model)
    with pytest.raises(InvalidInput, match="2 is prepared in the model alone; prepare as before"):
        rt.qat.load_state_dict(model, {"0": state["0"]})
    with pytest.raises(InvalidInput, match="0 is 2:4 in the state alone; prepare as before"):
        rt.qat.load_state_dict(rt.qat.prepare(small(), "int4:32"), state)
    with pytest.raises(InvalidInput, match=r"the mask of 0 is \(4, 4\); must be \(96, 64\)"):
        rt.qat.load_state_dict(model, state | {"0": {"steps": 0, "chosen_at": 0, "mask": torch.ones(4, 4, dtype=torch.bool)}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [None, "fp8", "int8", "int4:32", "mxfp4", "w8"])
def test_prepared_and_converted_have_the_same_bits(format: str | None, dtype: torch.dtype) -> None:
    model, x = sparse(format, dtype=dtype), data(dtype=dtype)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).square().mean().backward()
    optimiser.step()
    y, mask = model(x), two_four(model[0].parameter)
    # masked first: the scales are those of what is kept
    if format is not None:
        kind, _, group = format.partition(":")
        due = rt.quantise_weight(torch.where(mask, model[0].parameter, 0.0), kind, group=int(group) if group else None)
        assert torch.equal(model[0].codes().dequantise(), due.dequantise())
        assert not due.dequantise()[~mask].any()
    rt.qat.convert(model)
    assert torch.equal(model(x), y)
    if format is None:
        assert isinstance(model[0], rt.qat.SparseLinear)
        assert torch.equal(model[0].sparse.dense() != 0, mask)
        copied = rt.qat.convert(sparse(dtype=dtype, seed=4))
        copied.load_state_dict(model.state_dict())
        assert torch.equal(copied(x), y)
        assert model.to(torch.float16)(x.half()).dtype == torch.float16


def test_only_clipped_weights_of_what_is_kept_lose_their_gradient() -> None:
    model = rt.qat.prepare(small(), "int4:32", sparsity=Recipe(), estimator="clip")
    model(data()).square().mean().backward()
    lost = model[0].weight.grad == 0
    assert lost.any()
    assert not lost[~model[0].mask].any()


@pytest.mark.parametrize("estimator", ["straight", "clip"])
@pytest.mark.parametrize("format", ["int8", "int4:32"])
def test_no_copy_of_a_weight_lives_until_the_backward(format: str, estimator: str) -> None:
    model = rt.qat.prepare(small(), format, sparsity=Recipe(), estimator=estimator)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = model(data())
    shapes = {layer.parameter.shape: layer.parameter for layer in (model[0], model[2])}
    weights = [x for x in saved if x.shape in shapes]
    copied = [x for x in weights if x.data_ptr() != shapes[x.shape].data_ptr()]
    # the definition of "clip" looks at the weight with its zeros in place
    assert len(copied) == (2 if estimator == "clip" and format != "int8" else 0)
    y.square().mean().backward()
    due = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    # whoever watches sees the operator, which takes a weight with its zeros in place
    with torch.profiler.profile():
        model(data()).square().mean().backward()
    for p, one in zip(model.parameters(), due, strict=True):
        torch.testing.assert_close(p.grad, one)
    model.zero_grad()
    y = model(data())
    with torch.profiler.profile():
        y.square().mean().backward()
    for p, one in zip(model.parameters(), due, strict=True):
        torch.testing.assert_close(p.grad, one)


def test_restored_copied_and_pickled() -> None:
    model, x = sparse(), data()
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), y)
    assert model.state_dict().keys() == small().state_dict().keys()
    assert "2:4" in repr(model)
    with rt.qat.off(model):
        assert torch.equal(model(x), small()(x))
    assert rt.qat.restore(model) is model
    assert vars(model[0]).keys() == vars(small()[0]).keys()
    assert torch.equal(model(x), small()(x))


@pytest.mark.parametrize("format", [None, "int4:32"])
def test_compiled_training_equals_eager_and_is_compiled_once(format: str | None) -> None:
    models = [sparse(format, refresh=2, freeze_from=5), sparse(format, refresh=2, freeze_from=5)]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(models[1], backend=counter)
    optimisers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for n in range(7):
        losses = [step(model, optimiser, n) for model, optimiser in zip((models[0], compiled), optimisers, strict=True)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert torch.equal(models[0][0].mask, models[1][0].mask)
    assert counter.frame_count == 1


def test_autocast_inference_and_transforms() -> None:
    model, x = sparse(), data()
    y = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert torch.equal(model(x), y)
    torch.testing.assert_close(torch.vmap(model)(x), y)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    found = torch.func.grad(loss)(parameters)
    model(x).square().mean().backward()
    torch.testing.assert_close(found["0.weight"], model[0].weight.grad)


def test_start_step_and_formats_by_name() -> None:
    model = rt.qat.prepare(small(), {"0": None, "2": "int4:32"}, sparsity=Recipe(decay=DECAY), start_step=1)
    assert [one.format for one in rt.qat.status(model).layers] == ["2:4", "int4:32 2:4"]
    assert torch.equal(model(data()), small()(data()))
    w = model[0].parameter.detach().clone()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data()).square().mean().backward()
    gradient = model[0].weight.grad.clone()
    optimiser.step()
    # what is not masked yet is not decayed either
    torch.testing.assert_close(model[0].parameter.detach(), w - 0.1 * gradient)
    with rt.qat.off(model):
        full = model(data())
    assert not torch.equal(model(data()), full)


def test_bad_input() -> None:
    for options, sentence in (
        ({"format": None}, "format is None and so is sparsity, so nothing would change"),
        ({"format": {"0": None}}, "format is None and so is sparsity"),
        ({"format": None, "sparsity": True}, r"sparsity is True; must be a rooftile.sparsity.Recipe, or None"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            rt.qat.prepare(small(), **options)
    odd = nn.Sequential(nn.Linear(64, 34), nn.Linear(34, 8))
    with pytest.raises(InvalidInput, match=r"1.weight \(8, 34\) cannot be 2:4; K must be a multiple of 4: skip this layer"):
        rt.qat.prepare(odd, None, sparsity=Recipe())
    with pytest.raises(InvalidInput, match=r"0.weight \(34, 64\) cannot be 2:4; both sizes must be multiples of 4"):
        rt.qat.prepare(odd, None, sparsity=Recipe(transposable=True))
    assert type(odd[0]) is nn.Linear
    frozen = small()
    frozen[2].weight.requires_grad_(False)
    with pytest.raises(InvalidInput, match=r"2.weight is frozen, and 2:4 trains all of a weight; unfreeze it, or skip"):
        rt.qat.prepare(frozen, None, sparsity=Recipe())
    model = sparse()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data()).sum().backward()
    model[0].weight.grad[3, 5] = math.nan
    with pytest.raises(InvalidInput, match=r"0.weight after 1 steps cannot be 2:4: weight is NaN at row 3, column 5"):
        optimiser.step()
    words = rt.qat.prepare(nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64)), {"0": "int8", "1": "int8"}, sparsity=Recipe())
    assert [one.flips for one in rt.qat.status(words).layers] == [None, 0.0]
    with pytest.raises(InvalidInput, match="0 is an embedding, and its format is None; only linear layers are made 2:4"):
        rt.qat.prepare(nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 64)), {"*": None}, sparsity=Recipe())


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_weight_that_is_frozen_after_prepare_is_refused_in_training(format: str | None) -> None:
    """The forward refuses it as `prepare` refuses one that was frozen before; whatever trains nothing goes on."""
    model, x = sparse(format), data()
    with torch.no_grad():
        due = model(x)
    model[2].weight.requires_grad_(False)
    sentence = r"^2.weight is frozen, and 2:4 trains all of a weight; unfreeze it, or put the layer in evaluation mode$"
    with pytest.raises(InvalidInput, match=sentence):
        model(x)
    with pytest.raises(InvalidInput, match=sentence):
        checkpoint(model, x, use_reentrant=False)
    torch._dynamo.reset()
    with pytest.raises(InvalidInput, match=sentence):
        torch.compile(model, backend="aot_eager")(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x), due)
            assert torch.equal(compiled(x), due)
    with rt.qat.off(model):
        assert torch.equal(model(x), small()(x))
    constants = {name: p.detach() for name, p in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, constants, (x,)), due)
    dx = torch.func.grad(lambda x: torch.func.functional_call(model, constants, (x,)).sum())(x)
    # the layer alone in evaluation mode, as where two models train in turns
    model[2].eval()
    z = x.clone().requires_grad_()
    for run in (model, compiled, lambda z: checkpoint(model, z, use_reentrant=False)):
        y = run(z)
        assert torch.equal(y, due)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), z)[0], dx)
    assert model.eval()(x).equal(due)
    model.train()[2].weight.requires_grad_(True)
    checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).sum().backward()
    assert model[2].weight.grad is not None


def test_a_weight_that_is_frozen_until_masks_begin_is_not_refused() -> None:
    model = rt.qat.prepare(small(), None, sparsity=Recipe(), start_step=1)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight.requires_grad_(False)
    step(model, optimiser)
    with pytest.raises(InvalidInput, match=r"0.weight is frozen"):
        step(model, optimiser)


def test_outliers_and_an_mlp_of_odd_sizes() -> None:
    # the last layer has 37 rows
    model = rt.qat.prepare(mlp(), "int8", sparsity=Recipe())
    assert model(inputs()).isfinite().all()


@pytest.mark.parametrize("format", [None, "int4:32"])
@pytest.mark.parametrize("train", [False, True])
def test_what_is_served_has_the_mask_of_the_weight_as_it_is(format: str | None, train: bool) -> None:
    """A copy into `.data`, as averages of weights are put in, raises no version."""
    model, x = sparse(format), data()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(x).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()
    model.train(train)(x)
    w = torch.randn_like(model[0].weight)
    model[0].weight.data.copy_(w)
    kept = w * two_four(w)
    if not train:
        fresh = sparse(format)
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(model(x), fresh.eval()(x))
    made = rt.qat.convert(model)[0]
    assert (
        torch.equal(made.sparse.dense(), kept)
        if format is None
        else torch.equal(made.quantised.codes, rt.quantise_weight(kept, "int4", group=32).codes)
    )
