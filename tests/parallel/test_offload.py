"""`parallel.offload`: saved tensors on the host. On a CPU they are copies, which computes the same."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rooftile.errors import InvalidInput
from rooftile.parallel import offload
from rooftile.parallel.offload import AHEAD, _Host, _Saved


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)))


def gradients(module: nn.Module, x: torch.Tensor, checkpointed: bool = False, retain: bool = False) -> list[torch.Tensor]:
    y = x
    for block in module:
        y = checkpoint(block, y, use_reentrant=False) if checkpointed else block(y)
    loss, leaves = y.square().sum(), [x, *module.parameters()]
    if retain:
        torch.autograd.grad(loss, leaves, retain_graph=True)
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize(("checkpointed", "retain"), [(False, False), (True, False), (False, True)])
def test_gradients_are_the_same_bits(checkpointed: bool, retain: bool) -> None:
    module, x = model(), torch.randn(2, 5, 8).transpose(0, 1).requires_grad_()
    due = gradients(module, x)
    with offload(min_bytes=0):
        y = gradients(module, x, checkpointed, retain)
    for a, b in zip(y, due, strict=True):
        assert torch.equal(a, b)


def test_saved_tensors_are_copies_and_parameters_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    pack = _Host.pack

    def seen(self: _Host, x: torch.Tensor) -> object:
        found = pack(self, x)
        moved.append((x, found))
        return found

    monkeypatch.setattr(_Host, "pack", seen)
    module, x = model(), torch.randn(5, 8)
    with offload(min_bytes=5 * 16 * 4):
        loss = module(x).sum()
    stays = [x for x, found in moved if not isinstance(found, _Saved)]
    assert {x.numel() for x, found in moved if isinstance(found, _Saved)} == {5 * 16}
    # weights, also transposed, and activations that are too small
    assert {tuple(x.shape) for x in stays} >= {(8, 16), (5, 8)}
    # the activation that the next product also reads is one copy
    assert len({id(found) for _, found in moved if isinstance(found, _Saved)}) == 8
    loss.backward()


def test_a_copy_lives_as_long_as_the_graph() -> None:
    x = torch.randn(100, requires_grad=True)
    with offload(min_bytes=0) as none:
        y = x.exp().exp().exp()
    assert none is None
    copies = [weakref.ref(saved) for saved in gc.get_objects() if type(saved) is _Saved]
    assert len(copies) == 3
    del y
    gc.collect()
    assert not any(copy() for copy in copies)


def test_a_tensor_that_is_changed_early_raises() -> None:
    x = torch.randn(10, requires_grad=True)
    with offload(min_bytes=0):
        y = x * 1
        z = y.square().sum()
        y.data.add_(1)
        y.detach().add_(1)
    with pytest.raises(InvalidInput, match="was changed in place inside of offload"):
        z.backward()
    # a tensor that is changed after its copy has ended comes back as it was
    with offload(min_bytes=0):
        y = x * 1
        z = y.square().sum()
        for _ in range(AHEAD + 1):
            z = z + (x * 2).square().sum()
        y.detach().add_(1)
    (found,) = torch.autograd.grad(z, x)
    torch.testing.assert_close(found, 2 * x.detach() + (AHEAD + 1) * 8 * x.detach())


def test_nested_hooks_compiled_blocks_and_another_thread() -> None:
    module, x = model(), torch.randn(5, 8, requires_grad=True)
    due = gradients(module, x)
    with offload(min_bytes=0), torch.autograd.graph.save_on_cpu():
        for a, b in zip(gradients(module, x), due, strict=True):
            assert torch.equal(a, b)
    torch._dynamo.reset()
    compiled = [torch.compile(block, backend="aot_eager") for block in module]
    with offload(min_bytes=0):
        y = x
        for block in compiled:
            y = block(y)
    # outside of the context, as a training loop has it
    for a, b in zip(torch.autograd.grad(y.square().sum(), [x, *module.parameters()]), due, strict=True):
        torch.testing.assert_close(a, b)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="min_bytes is -1"), offload(min_bytes=-1):
        pass


@pytest.mark.parametrize("inside", [False, True])
def test_compiled_functions_inside_of_the_context_and_around_it(inside):
    module, x = model(), torch.randn(3, 8, requires_grad=True)

    def moved(x: torch.Tensor) -> torch.Tensor:
        with offload(min_bytes=0):
            return module(x).square().sum()

    if inside:
        with offload(min_bytes=0):
            loss = torch.compile(module, backend="aot_eager")(x).square().sum()
    else:
        loss = torch.compile(moved, backend="aot_eager")(x)
    leaves = [x, *module.parameters()]
    for found, due in zip(torch.autograd.grad(loss, leaves), gradients(module, x), strict=True):
        torch.testing.assert_close(found, due)
