"""Bytes of fused chains, counted by hand as a compiler would fuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile.diagnosis.remedies import alone
from rooftile.diagnosis.remedies.fusion.chains import Chain, find_chains
from rooftile.diagnosis.remedies.fusion.recompute import recompute
from rooftile.diagnosis.watching.watch import Watch
from tests.diagnosis.operators import sample

ROWS, WIDTH = 64, 256
# bytes of one activation
BYTES = 4 * ROWS * WIDTH


def chains_of(step: Callable[[], Any], *, compiled: bool = True) -> list[tuple[str, int, Chain]]:
    """The operators, the bytes and the chain of each of two or more calls; compiled: with what a backward makes again."""
    watch = Watch()
    with watch:
        step()
    chains = find_chains(watch.calls, watch.kept, fewest=1)
    if compiled:
        chains = recompute(chains, watch.calls, watch.kept)
    names = [" ".join(watch.operations[call.row].op.removeprefix("aten::") for call in chain.calls) for chain in chains]
    found = zip(names, chains, strict=True)
    return [(name, chain.bytes_fused, chain) for name, chain in found if len(chain.calls) > 1]


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def test_a_sum_of_all_ends_a_chain_and_its_result_begins_another() -> None:
    x = torch.randn(ROWS, WIDTH)
    ((names, moved, chain),) = chains_of(lambda: (x * 2 + 1).sum() + 3)
    assert names == "mul add sum"
    assert (moved, chain.bytes_now) == (BYTES + 4, 5 * BYTES + 4)
    # what reads the numbers and not the sum goes on beside it
    y = torch.empty_like(x)
    both = chains_of(lambda: (torch.mul(x, 2, out=y).sum(), y.add_(1)))
    assert [(names, moved) for names, moved, _ in both] == [("mul sum add_", 2 * BYTES + 4)]


def test_a_batch_norm_in_training_is_a_kernel_of_two_passes() -> None:
    x = torch.randn(ROWS, WIDTH)
    small = 4 * WIDTH
    for training, passes in ((True, 2), (False, 1)):
        mean, var = torch.zeros(WIDTH), torch.ones(WIDTH)
        ((names, moved, chain),) = chains_of(lambda: F.batch_norm(x, mean, var, training=training).relu())  # noqa: B023
        assert names == "native_batch_norm relu"
        assert (chain.calls[0].passes, chain.calls[0].anew, chain.calls[1].anew) == (passes, True, False)
        assert (1 + passes) * BYTES <= moved <= (1 + passes) * BYTES + 10 * small
    layer = nn.BatchNorm1d(WIDTH)
    watch = Watch()
    with watch:
        layer(x.requires_grad_()).sum().backward()
    (backward,) = [call for call in watch.calls if "batch_norm_backward" in watch.operations[call.row].op]
    assert (backward.passes, backward.anew) == (2, True)


def test_a_forward_is_not_fused_with_its_backward() -> None:
    x = weights(ROWS, WIDTH)
    found = chains_of(lambda: x.sin().exp().sum().backward())
    assert all(len({call.backward for call in chain.calls}) == 1 for *_, chain in found)
    assert [chain.calls[0].backward for *_, chain in found] == [False, True]


def test_a_backward_makes_again_what_is_made_of_a_tensor_that_is_there() -> None:
    """GELU by hand, between products: the forward reads h and writes y; the backward reads h and dy, and writes dh."""
    x, first, second = torch.randn(ROWS, WIDTH), weights(WIDTH, WIDTH), weights(WIDTH, WIDTH)

    def step() -> None:
        h = x @ first
        y = 0.5 * h * (1 + torch.tanh(0.79 * (h + 0.0447 * torch.pow(h, 3))))
        (y @ second).sum().backward()

    forward, backward = chains_of(step)
    assert forward[0] == "mul pow mul add mul tanh add mul"
    assert (forward[1], backward[1]) == (2 * BYTES, 3 * BYTES)
    assert len(backward[2].again) == 7
    # without it the forward writes h / 2, h^2 through pow, tanh and 1 + tanh for the backward as well
    plain = chains_of(step, compiled=False)
    assert plain[0][1] > 2 * BYTES
    assert sum(moved for _, moved, _ in plain) > sum(moved for _, moved, _ in (forward, backward))


def test_a_loss_stores_no_log_probabilities() -> None:
    x, weight = torch.randn(ROWS, WIDTH), weights(WIDTH, WIDTH)
    targets = torch.randint(WIDTH, (ROWS,))
    forward, backward = chains_of(lambda: F.cross_entropy(x @ weight, targets).backward())
    assert (forward[0], backward[0]) == ("_log_softmax nll_loss_forward", "nll_loss_backward _log_softmax_backward_data")
    # logits are read in both, and their gradient is written; the rest are targets, picked numbers and a weight
    small = 8 * ROWS + 4 * ROWS + 16
    assert BYTES <= forward[1] <= BYTES + small
    assert 2 * BYTES <= backward[1] <= 2 * BYTES + small


def test_random_numbers_and_what_a_product_reads_are_kept() -> None:
    x, weight = torch.randn(ROWS, WIDTH), weights(WIDTH, WIDTH)

    def step() -> None:
        h = x @ weight
        F.dropout(h.relu(), 0.3).mm(weight).sum().backward()

    for _, moved, chain in chains_of(step):
        if any(call.draws for call in chain.calls):
            # h is read; the mask, and the product's factor, are written
            assert moved >= 2 * BYTES
            assert not chain.again


def test_gradients_of_a_norm_take_a_second_pass_for_those_of_its_weight() -> None:
    norm, x = nn.LayerNorm(WIDTH), weights(ROWS, WIDTH)
    found = {names: moved for names, moved, _ in chains_of(lambda: (norm(x * 2) * 3).sin().sum().backward())}
    backward = next(moved for names, moved in found.items() if "native_layer_norm_backward" in names)
    # x and the sine's argument come from outside (the norm is made again); x's gradient is written
    assert backward >= 3 * BYTES


def test_a_gather_reads_the_rows_that_it_touches() -> None:
    table, scale = torch.randn(5000, WIDTH), torch.randn(ROWS, WIDTH)
    indices = torch.arange(ROWS)
    ((names, moved, chain),) = chains_of(lambda: F.embedding(indices, table) * scale)
    assert names == "embedding mul"
    assert (moved, chain.bytes_now) == (3 * BYTES + 8 * ROWS, 5 * BYTES + 8 * ROWS)


def test_a_call_that_reads_two_chains_makes_them_one() -> None:
    a, b = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    ((names, moved, _),) = chains_of(lambda: a.sin().exp() + b.cos().exp())
    assert names == "sin exp cos exp add"
    assert moved == 3 * BYTES
    weight = torch.randn(WIDTH, WIDTH)

    def through_a_product() -> Tensor:
        y = a.sin().exp()
        return y + (y @ weight).cos()

    assert [names for names, *_ in chains_of(through_a_product)] == ["sin exp", "cos add"]


@pytest.mark.parametrize(("n", "tried"), [(64, False), (63, True)])
def test_a_product_that_does_not_fit_16_bytes_is_tried_padded(
    n: int, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    left, right = torch.randn(8, 32), torch.randn(32, n)
    results = []

    def times_us(works: list[Callable[[], Tensor]], device: torch.device) -> list[float]:
        results.extend(work() for work in works)
        return [30.0, 20.0]

    monkeypatch.setattr(alone, "times_us", times_us)
    product = sample(torch.ops.aten.mm.default, left, right)
    assert alone.aligned_saving_us(product, torch.device("cpu")) == (10.0 if tried else 0.0)
    assert len(results) == 2 * tried
    if tried:
        assert torch.allclose(results[0], results[1], atol=1e-5)
