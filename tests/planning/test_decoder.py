"""Plans of checkpoints and decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import rooftile as rt
from rooftile.models import Decoder, ExpertSizes, TrainableDecoder
from rooftile.moe import Router
from rooftile.planning import timing
from rooftile.planning.costs import DeviceCeilings, passes_of
from rooftile.planning.targets.decoders import DecoderTarget, Phase
from rooftile.planning.timing import Size, TimedCalls, Times, products_of
from tests.models.quantised import PROJECTIONS
from tests.planning.machine import CEILINGS, CPU, Pretended
from tests.planning.models import llama, tokens

ROWS = {"decode": 4, "prompt": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save(path)
    return path


def test_rows_and_shares_make_a_step(folder: Path) -> None:
    """The time of an item is that of its rows, each by its share of the steps."""
    plan = rt.plan(folder, rows=ROWS, shares={"decode": 3, "prompt": 1}, context=16, formats=["bf16"], device="cpu")
    first = plan.layers[0]
    assert first.name == "layers.0.self_attn.q_proj, k_proj, v_proj"
    assert [(load.phase, load.rows, load.calls) for load in first.loads] == [("decode", 4, 0.75), ("prompt", 32, 0.25)]
    machine = DeviceCeilings(CPU, CEILINGS)
    due = [machine.us(passes_of(rows, 192, 64, "bf16", "fp32", 4, on_gpu=False)) for rows in (4, 32)]
    assert first.choice.predicted_us == pytest.approx(0.75 * due[0] + 0.25 * due[1])
    # two prompts of 16 tokens need the logits of their last tokens
    assert [load.rows for load in plan.layers[-1].loads] == [4, 2]
    assert plan.layers[-1].name == "lm_head"
    assert plan.total.measured_us == pytest.approx(plan.total.kept_layers_us), "its clock knows of layers alone"


def test_operators_of_a_decoder_have_their_bounds(folder: Path) -> None:
    plan = rt.plan(folder, rows=ROWS, context=16, formats=["bf16"], measure=False, device="cpu")
    found = {other.operator: other for other in plan.others}
    assert found.keys() == {"add_norm", "gate", "rotate, cache_write", "attention, decode", "attention, prompt"}
    # 4 rows and 32, half of the steps each: x and the sum are read, the sum and the norm written, and 64 weights read
    assert found["add_norm"].nbytes == 2 * 2 * (0.5 * 4 * (4 * 4 * 64 + 64) + 0.5 * 4 * (4 * 32 * 64 + 64))
    # each of 4 answers reads 16 keys and values of 64 numbers, q and o
    assert found["attention, decode"].nbytes == 2 * 0.5 * 4 * 4 * (2 * 16 * 64 + 2 * 64)
    assert found["attention, decode"].flops == 2 * 0.5 * 4 * 4 * 16 * 64
    # two causal prompts of 16
    assert found["attention, prompt"].flops == 2 * 0.5 * 2 * 4 * 64 * (16 * 17 // 2)


def test_the_weights_of_a_plan_are_those_that_llm_reads(folder: Path) -> None:
    plan = rt.plan(folder, rows=ROWS, context=16, formats=["int4:32"], measure=False, device="cpu")
    assert plan.weights["layers.1.mlp.gate_proj"] == "int4:32"
    assert "lm_head" not in plan.weights
    applied = plan.apply(Decoder.from_folder(folder))
    read = Decoder.from_folder(folder, weights=plan.weights)
    for layer, other in zip(applied.layers, read.layers, strict=True):
        for name in PROJECTIONS:
            assert torch.equal(layer.get_submodule(name).dequantised(), other.get_submodule(name).dequantised())
            assert layer.get_submodule(name).weight is None
    llm = rt.LLM(folder, weights=plan.weights, device="cpu", num_blocks=20)
    (found,) = llm.generate([[1, 2, 3]], rt.SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(found.outputs[0].token_ids) == 3


def test_losses_on_data_are_those_of_the_module(folder: Path) -> None:
    data = tokens()
    plan = rt.plan(folder, rows=ROWS, context=16, data=data, formats=["bf16", "int4:32"], measure=False, device="cpu")

    def loss(decoder: TrainableDecoder) -> float:
        with torch.no_grad():
            return cross_entropy(decoder(data[:, :-1]).flatten(0, 1), data[:, 1:].flatten()).item()

    base = loss(llama())
    assert plan.total.base_loss == pytest.approx(base, abs=1e-5)
    module = rt.plan(llama(), data, data=data, formats=["bf16", "int4:32"], skip=["head"], measure=False)
    for ours, its in zip(plan.layers, module.layers, strict=True):
        assert [o.loss for o in ours.options] == pytest.approx([o.loss for o in its.options], abs=2e-5)
    # texts of other lengths, as lists of numbers
    one = rt.plan(folder, rows=ROWS, context=16, data=data[0].tolist(), formats=["bf16"], measure=False, device="cpu")
    with torch.no_grad():
        due = cross_entropy(llama()(data[:1, :-1])[0], data[0, 1:]).item()
    assert one.total.base_loss == pytest.approx(due, abs=1e-5)


def test_a_decoder_is_as_before(folder: Path) -> None:
    decoder = Decoder.from_folder(folder)
    before = [(id(x), x.clone()) for x in decoder.parameters()]
    numbers = torch.get_rng_state()
    rt.plan(decoder, rows=ROWS, context=16, data=tokens(), max_loss=0.5)
    assert all(id(x) == one and torch.equal(x, y) for x, (one, y) in zip(decoder.parameters(), before, strict=True))
    assert all(projection.parts == () for layer in decoder.layers for projection in layer.projections)
    assert torch.equal(torch.get_rng_state(), numbers)


def test_codes_come_from_the_kernel_before_where_one_writes_them(folder: Path) -> None:
    """Norms and gates of the engine write FP8; what attention returns is quantised by the product."""
    plan = rt.plan(folder, rows={"decode": 4}, context=16, formats=["fp8"], measure=False, device="cpu")
    machine = DeviceCeilings(CPU, CEILINGS)
    for layer, given in zip(plan.layers[:4], (True, False, True, True), strict=True):
        N, K = sum(part.N for part in layer.parts), layer.parts[0].K
        due = machine.us(passes_of(4, N, K, "fp8", "fp32", 4, on_gpu=False, gets_codes=given))
        assert layer.choice.predicted_us == pytest.approx(due)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, r"rows is None; of a checkpoint must be such as \{'decode': 256, 'prompt': 8192\}"),
        ({"rows": {}}, "rows is {}; of a checkpoint must be"),
        ({"rows": ROWS, "skip": ["*.o_proj"]}, "skip is .* and the model a checkpoint; leave it out: its embedding and head"),
        ({"rows": {"train": 4}}, "rows has 'train'; must be such as"),
        ({"rows": {"decode": 0}}, r"rows\['decode'\] is 0; must be a whole number, 1 or more"),
        ({"rows": {"decode": 4.5}}, r"rows\['decode'\] is 4.5; must be a whole number"),
        ({"rows": ROWS, "shares": {"decode": 1}}, "shares is .*; must have a number for each of decode, prompt"),
        ({"rows": {"decode": 4}, "shares": {"decode": 0}}, "must be numbers that are not negative, and not all 0"),
        ({"rows": {"decode": 4}, "context": 65}, "context is 65 tokens, and the model has 64 positions"),
        ({"rows": {"decode": 4}, "context": 0}, "context is 0; must be a whole number, 1 or more"),
        ({"rows": {"decode": 4}, "context": 8, "data": "text"}, "data is str; must be token ids"),
        ({"rows": {"decode": 4}, "context": 8, "data": [5]}, "a text of fewer than two tokens"),
        ({"rows": {"decode": 4}, "context": 8, "data": list(range(66))}, "a text of 66 tokens, and the model 64 positions"),
    ],
)
def test_wrong_arguments_are_a_sentence(folder: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(rt.InvalidInput, match=words):
        rt.plan(folder, device="cpu", **options)


def test_inputs_and_checkpoints_do_not_go_together(folder: Path) -> None:
    with pytest.raises(rt.InvalidInput, match="1 inputs are given for a checkpoint; write rows="):
        rt.plan(folder, tokens(), rows=ROWS)
    with pytest.raises(rt.InvalidInput, match="model is int; must be a module, a checkpoint's folder or a Decoder"):
        rt.plan(5, rows=ROWS)  # type: ignore[arg-type]


def test_quantised_and_other_decoders_are_refused(folder: Path, tmp_path: Path) -> None:
    quantised = Decoder.from_folder(folder, weights="int8")
    with pytest.raises(rt.InvalidInput, match="weights are quantised already; give the 16-bit checkpoint"):
        rt.plan(quantised, rows=ROWS, context=16)
    sparse = TrainableDecoder(97, hidden=64, heads=4, layers=1, ffn=128, max_len=64, mixers="native_sparse")
    sparse.save(tmp_path)
    with pytest.raises(rt.Unsupported, match="layers of native_sparse, and a plan knows exact attention alone"):
        rt.plan(tmp_path, rows=ROWS, context=16, device="cpu")
    config = replace(
        quantised.config, feed_forwards=("experts",) * quantised.config.layers,
        experts=ExpertSizes(experts=2, hidden=8, router=Router(active=1)),
    )  # fmt: skip
    with pytest.raises(rt.Unsupported, match="layers with experts, and a plan knows dense feed-forwards alone"):
        rt.plan(Decoder.random(config, torch.float32, "cpu"), rows=ROWS, context=16)
    plan = rt.plan(folder, rows=ROWS, context=16, formats=["int8"], measure=False, device="cpu")
    with pytest.raises(rt.InvalidInput, match="model is a Decoder, which has no gradients"):
        plan.prepare(Decoder.from_folder(folder))


def test_a_decode_step_is_timed_over_more_weights_than_the_cache_holds(
    folder: Path, stopwatch: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's step finds no weight in the L2 cache, so a graph walks through copies."""
    monkeypatch.setattr(timing, "cache_bytes_of", lambda device: 1 << 20)
    walked: list[tuple[int, int]] = []
    pretended = stopwatch.us

    def us(works: Sequence[TimedCalls]) -> list[float]:
        walked.extend((len(work.runs), work.passes[0].bytes) for work in works)
        return pretended(works)

    monkeypatch.setattr(stopwatch, "us", us)
    item = next(iter(DecoderTarget(Decoder.from_folder(folder), "it", [Phase("decode", 4, 1.0)], 16).items))
    Times(stopwatch, CPU).take(item, {"bf16": [Size(4, replayed=True), Size(4)], "int4:32": [Size(4, replayed=True)]})
    kept, codes = 4 * 192 * 64, 192 * 64 // 2 + 2 * 192 * 2
    assert [count for count, _ in walked] == [-(-(4 << 20) // kept), 1, -(-(4 << 20) // codes)]


def test_copies_of_weights_are_no_views(folder: Path) -> None:
    item = next(iter(DecoderTarget(Decoder.from_folder(folder), "it", [Phase("decode", 4, 1.0)], 16).items))
    (weight,), x = item.weights(), torch.randn(4, 64)
    own, copy = products_of(item, "bf16"), products_of(item, "bf16", copied=True)
    (due,) = copy(x)
    assert torch.equal(own(x)[0], due)
    weight.zero_()
    assert not own(x)[0].any()
    assert torch.equal(copy(x)[0], due)
