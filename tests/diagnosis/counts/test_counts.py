"""FLOPs, special functions and bytes of operators, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import rooftile as rt
from rooftile.diagnosis.counts import counts
from rooftile.diagnosis.records import OperatorRow
from rooftile.diagnosis.watching.watch import Record, Watch


def watched(step: Callable[[], Any]) -> list[OperatorRow]:
    with Watch() as watch:
        step()
    return watch.operations


def total(step: Callable[[], Any]) -> tuple[int, int, int]:
    """FLOPs, special functions and bytes of a step."""
    found = watched(step)
    assert all(None not in (o.flops, o.special, o.bytes) for o in found), [o.op for o in found]
    return tuple(sum(getattr(o, name) * o.calls for o in found) for name in ("flops", "special", "bytes"))


x = torch.randn(30, 40)
y = torch.randn(30, 40)
wide = torch.randn(30, 40, dtype=torch.float64)
targets, made = torch.arange(30), torch.zeros(30, 40)
MB = torch.randn(64, 128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("step", "due"),
    [
        (lambda: x + 1, (1200, 0, 2 * 4800)),
        (lambda: x + x, (1200, 0, 2 * 4800)),
        (lambda: x + y, (1200, 0, 3 * 4800)),
        (lambda: wide * 2, (1200, 0, 2 * 9600)),
        (lambda: x.exp(), (0, 1200, 2 * 4800)),
        (lambda: x.clone().add_(1), (1200, 0, 4 * 4800)),
        (lambda: torch.mul(x, 2, out=made), (1200, 0, 2 * 4800)),
        # it reads the log-probability of each row's target, and writes a total weight
        (lambda: torch.nn.functional.nll_loss(x, targets), (0, 0, 30 * 4 + 30 * 8 + 2 * 4)),
        (lambda: torch.zeros(30, 40).copy_(x), (0, 0, 4800 + 2 * 4800)),
        # views cost nothing
        (lambda: x.t().reshape(40, 30)[3:].unsqueeze(0), (0, 0, 0)),
        (lambda: x[:, :10] + 1, (300, 0, 2 * 1200)),
        # expanded and overlapping operands
        (lambda: x[:1].expand(30, 40) + y, (1200, 0, 160 + 2 * 4800)),
        (lambda: x.flatten().unfold(0, 100, 1) + 1, (110_100, 0, 4800 + 110_100 * 4)),
        (lambda: x[:20] + x[10:], (800, 0, 4800 + 3200)),
        (lambda: x.t() @ y, (2 * 40 * 30 * 40, 0, 2 * 4800 + 40 * 40 * 4)),
        (lambda: MB @ MB.t(), (2 * 64 * 128 * 64, 0, 64 * 128 * 2 + 64 * 64 * 2)),
        (lambda: x.sum(), (1200, 0, 4800 + 4)),
        (lambda: torch.cat([x, y]), (0, 0, 4 * 4800)),
        (lambda: torch.where(x > 0, x, y), (1200, 0, 4800 + 1200 + 1200 + 2 * 4800 + 4800)),
        (lambda: torch.softmax(x, -1), (3 * 1200, 2 * 1200, 2 * 4800)),
        (lambda: x.square(), (1200, 0, 2 * 4800)),
    ],
)  # fmt: skip
def test_exact_counts(step: Callable[[], Any], due: tuple[int, int, int]) -> None:
    assert total(step) == due


def test_an_unfused_softmax_moves_more() -> None:
    def unfused() -> torch.Tensor:
        e = (x - x.amax(-1, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True)

    rows = 30 * 4
    assert total(unfused)[2] == (4800 + rows) + (4800 + rows + 4800) + 2 * 4800 + (4800 + rows) + (4800 + rows + 4800)


def test_gathers_read_the_rows_that_they_touch() -> None:
    table = torch.randn(1000, 16)
    rows = torch.tensor([[5, 5, 7], [999, 5, 0]])
    assert total(lambda: F.embedding(rows, table))[2] == 4 * 64 + 6 * 8 + 6 * 64
    assert total(lambda: table[rows])[2] == 4 * 64 + 6 * 8 + 6 * 64
    assert total(lambda: table.index_select(0, torch.tensor([3, 3])))[2] == 64 + 16 + 128
    picks = torch.zeros(1000, 2, dtype=torch.int64)
    assert total(lambda: table.gather(1, picks))[2] == 2000 * 4 + 2000 * 8 + 2000 * 4


def test_scattered_writes() -> None:
    target, values = torch.zeros(1000, 16), torch.randn(3, 16)
    rows = torch.tensor([5, 7, 9])

    def put() -> None:
        target[rows] = values

    def add() -> None:
        target.index_put_((rows,), values, accumulate=True)

    assert total(put)[2] == 3 * 64 + 24 + 3 * 64
    assert total(add)[2] == 2 * 3 * 64 + 24 + 3 * 64
    index = torch.zeros(2, 16, dtype=torch.int64)
    assert total(lambda: target.scatter_(0, index, values))[2] == 32 * 4 + 32 * 8 + 3 * 64


def test_a_convolution_with_groups_and_stride() -> None:
    image, kernel = torch.randn(2, 6, 15, 17), torch.randn(9, 2, 3, 3)
    flops, _, moved = total(lambda: F.conv2d(image, kernel, stride=2, groups=3))
    out = 2 * 9 * 7 * 8
    assert flops == 2 * out * 2 * 3 * 3
    assert moved == image.nbytes + kernel.nbytes + out * 4


@pytest.mark.parametrize("name", ["sdpa", "tiled"])
def test_our_attention_counts_by_the_cost_model(name: str) -> None:
    q, k, v = (torch.randn(2, 33, 4, 16, requires_grad=True) for _ in range(3))

    def step() -> None:
        rt.attention(q, k, v, rt.CAUSAL, backend=name).sum().backward()

    found = {o.op: o for o in watched(step)}
    forward = 2 * (16 + 16) * (33 * 34 // 2) * 2 * 4
    assert found["rooftile::attention"].flops == forward
    assert found["rooftile::attention_backward"].flops == forward * 5 // 2
    assert found["rooftile::attention_backward"].phase == "backward"


@pytest.mark.parametrize("causal", [False, True])
def test_pytorchs_attention_counts_as_ours(causal: bool) -> None:
    q, k, v = (torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3))

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()

    found = [o for o in watched(step) if "scaled_dot_product" in o.op]
    pairs = 33 * 34 // 2 if causal else 33 * 33
    assert [o.flops for o in found] == [2 * 32 * pairs * 8, 5 * 32 * pairs * 8]


def test_a_checkpointed_block_runs_its_forward_twice() -> None:
    block, given = nn.Linear(16, 16), torch.randn(8, 16, requires_grad=True)

    def products(step: Callable[[], Any]) -> int:
        return sum(o.flops * o.calls for o in watched(step) if o.op in ("aten::mm", "aten::addmm") and o.flops)

    plain = products(lambda: block(given).sum().backward())
    with set_checkpoint_early_stop(False):
        again = products(lambda: checkpoint(block, given, use_reentrant=False).sum().backward())
    assert again - plain == 2 * 8 * 16 * 16


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_adam_reads_and_writes_its_state(options: dict[str, bool]) -> None:
    weight = nn.Parameter(torch.randn(1000))
    weight.grad = torch.randn(1000)
    optimiser = torch.optim.Adam([weight], **options)
    optimiser.step()
    found = list(watched(optimiser.step))
    assert {o.phase for o in found} == {"optimiser"}
    assert all(o.bytes is not None and o.flops is not None for o in found), [o.op for o in found]
    moved = sum(o.bytes * o.calls for o in found if o.bytes)
    # weight, two moments: read and written; the gradient read
    least = 7 * 4000
    assert least <= moved
    if "fused" in options:
        assert moved <= least + 64


def test_modules_phases_and_lines() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))
    given = torch.randn(3, 4)

    def step() -> None:
        model(given).sum().backward()

    found = watched(step)
    first = next(o for o in found if o.op == "aten::addmm")
    assert (first.module, first.phase) == ("Sequential.0", "forward")
    assert first.where == f"tests/diagnosis/counts/test_counts.py:{step.__code__.co_firstlineno + 1}"
    assert {o.phase for o in found} == {"forward", "backward"}
    assert any(o.module == "Sequential.2" and o.phase == "backward" and o.op == "aten::mm" for o in found)


def test_nothing_stays_behind_when_a_step_raises() -> None:
    def step() -> None:
        nn.Linear(2, 2)(torch.randn(1, 2))
        raise ValueError("stop")

    hooks = dict(nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ValueError, match="stop"):
        watched(step)
    assert dict(nn.modules.module._global_forward_pre_hooks) == hooks


def test_operators_of_others_are_not_counted_until_somebody_says_how() -> None:
    @torch.library.custom_op("diagnosis_test::twice", mutates_args=())
    def twice(given: torch.Tensor) -> torch.Tensor:
        return given * 2

    def mine() -> OperatorRow:
        return next(o for o in watched(lambda: twice(x)) if "twice" in o.op)

    assert (mine().flops, mine().bytes) == (None, None)
    counts(flops=lambda given: given.numel(), bytes=lambda given: 2 * given.nbytes)(twice)
    assert (mine().flops, mine().bytes) == (1200, 9600)
    with pytest.raises(TypeError, match="custom_op"):
        counts()(len)


def test_a_sample_runs_again_with_its_values_and_strides() -> None:
    base = torch.randn(40, 30)
    step = lambda: torch.mm(base.t(), base)  # noqa: E731
    (operation,) = watched(step)
    with Record([operation], 1 << 20) as record:
        due = step()
    sample = record.samples[operation.kind]
    assert sample.args[0].stride() == base.t().stride()
    assert sample.args[0].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    # one storage stays one
    assert sample.args[0].untyped_storage().data_ptr() == sample.args[1].untyped_storage().data_ptr()
    base.zero_()
    assert torch.equal(sample.function(*sample.args, **sample.kwargs), due)
    with Record([operation], 100) as record:
        step()
    assert not record.samples


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert", "ViT"])
def test_every_operator_of_a_training_step_is_counted(family: str) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    if family == "GPT2":
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    if family == "ViT":
        sizes |= {"image_size": 32, "patch_size": 8}
        sizes.pop("vocab_size")
    config = getattr(transformers, f"{family}Config")(**sizes)
    heads = {"Llama": "ForCausalLM", "GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "ViT": "ForImageClassification"}
    model = getattr(transformers, f"{family}{heads[family]}")(config)
    optimiser = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 100, (2, 9))
    given: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if family == "ViT":
        given = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}

    def step() -> None:
        optimiser.zero_grad()
        model(**given).loss.backward()
        optimiser.step()

    step()
    found = watched(step)
    assert [o.op for o in found if None in (o.flops, o.bytes)] == []
    products = sum(o.flops * o.calls for o in found if o.op in ("aten::mm", "aten::addmm") and o.flops)
    assert products > 0.5 * sum(o.flops * o.calls for o in found if o.flops)


def test_inference_mode_has_the_same_operators_with_the_same_counts() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU())
    given = torch.randn(4, 8)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(given)
        # they are views of what fits, and copies of what does not
        given.t().contiguous(), given.t().reshape(-1), given.contiguous(), given.to(torch.float64)
        o = model(given)
        F.scaled_dot_product_attention(*[o.view(1, 1, 4, 16)] * 3, is_causal=True)

    with torch.no_grad():
        due = [(o.op, o.flops, o.special, o.bytes) for o in watched(step)]
    with torch.inference_mode():
        found = [(o.op, o.flops, o.special, o.bytes) for o in watched(step)]
    assert found == due
    assert all(None not in counted for counted in found)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_recurrent_layer_counts_its_matrices_once_a_token(kind: str) -> None:
    layer, x = getattr(torch.nn, kind)(6, 5), torch.rand(7, 3, 6, requires_grad=True)
    with Watch() as watch:
        layer(x)[0].sum().backward()
    gates = 4 if kind == "LSTM" else 3
    due = 2 * 7 * 3 * gates * 5 * (6 + 5)
    by_phase = {phase: sum(row.flops * row.calls for row in watch.operations if row.phase == phase and row.flops and
        ("mm" in row.op or "rnn" in row.op)) for phase in ("forward", "backward")}  # fmt: skip
    assert by_phase["forward"] == due
    # the gradients of the first state are not asked for
    assert 2 * due * 0.8 <= by_phase["backward"] <= 2 * due


def test_a_gradient_of_pooling_reads_no_input() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with Watch() as watch:
        F.avg_pool2d(x, 2).square().sum().backward()
    backward = next(op for op in watch.operations if op.op == "aten::avg_pool2d_backward")
    assert backward.bytes == 4 * (2 * 3 * 4 * 4 + x.numel())


def test_a_jagged_tensor_is_padded_without_arithmetic() -> None:
    values, offsets = torch.randn(7, 4), torch.tensor([0, 3, 7])
    with Watch() as watch:
        padded = torch.ops.aten._jagged_to_padded_dense_forward(values, [offsets], [5], 0.0)
        torch.ops.aten._padded_dense_to_jagged_forward(padded, [offsets], 7)
    there, back = watch.operations
    assert (there.flops, back.flops) == (0, 0)
    assert there.bytes == back.bytes == 4 * (7 * 4 + 2 * 5 * 4) + 8 * 3


def test_a_series_of_unknown_length_is_not_counted() -> None:
    x = torch.rand(5)
    with Watch() as watch:
        torch.igamma(x, x + 0)
    op = watch.operations[-1]
    assert (op.op, op.flops, op.special, op.bytes) == ("aten::igamma", None, None, 60)
