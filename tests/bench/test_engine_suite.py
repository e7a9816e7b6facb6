"""The engine suite: each engine answers each request as asked, and the GPU's idle time follows from its intervals."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from rooftile.diagnosis.programs import decode_step
from rooftile.engine.llm import LLM
from rooftile.engine.sampling.params import SamplingParams
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder, Mamba2Sizes
from rooftile_lab.bench import contexts, results
from rooftile_lab.bench.models import MODELS, decoder_named
from rooftile_lab.bench.suites import engine as suite
from rooftile_lab.bench.suites.engine import PARTS, EngineOptions
from rooftile_lab.bench.workloads import WorkloadRequest, named
from tests.bench.session import SESSION

transformers = pytest.importorskip("transformers")
# Transformers uses it to read the memory of a CPU
pytest.importorskip("psutil")

from rooftile_lab.bench import transformers_batching as peer  # noqa: E402

SCALE = 0.02
SDPA = "paged|sdpa"


@pytest.fixture(scope="module")
def decoder():
    made = decoder_named("tiny", torch.device("cpu"))
    for layer in made.layers:
        # larger than those of a benchmark: attention and feed-forward have a say in the next token
        layer.qkv.weight.mul_(8.0)
        layer.feed_forward.down.weight.mul_(20.0)
    return made


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # other tests compile kernels meanwhile, which would be counted in a cache that they share
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        # five requests of W1, of which the peer gets three; a machine that stands still for a minute stops none
        asked = EngineOptions(model="tiny", scale=SCALE, peer_requests=3, peer_limit_s=900.0, w8_requests=4)
        return list(suite.measure(asked, SESSION))


def asks(tokens: list[int]) -> list[WorkloadRequest]:
    """Requests with so many tokens in their answers."""
    sampled = [SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.6) for count in tokens]
    return [WorkloadRequest([7 * n + 1, 5, 9], params) for n, params in enumerate(sampled)]


# rows
LOOKED_UP = ("none", "a0.50", "a0.80", "a1.00", "edit", "summary")


def test_each_part_has_its_rows(rows, tmp_path) -> None:
    assert [(row.case.removesuffix("-tiny-x0.02"), row.backend, row.phase) for row in rows] == [
        ("start", "rooftile", "start"),
        ("W1", "rooftile", "serve"),
        ("W10", "rooftile", "serve"),
        ("W11", "rooftile", "serve"),
        ("decode-step-5x13", "rooftile", "decode"),
        ("start-again", "rooftile", "start"),
        ("idle-5x13", "rooftile", "decode"),
        ("W8-first-4", "rooftile, contiguous", "serve"),
        ("W8-first-4", "rooftile, paged", "serve"),
        *((f"context-8x{length}", "rooftile", "decode") for length in (33, 82, 328, 1311, 2621)),
        *((f"speculative-b{b}-{a}", "rooftile", "decode") for b in (1, 16, 256) for a in LOOKED_UP),
        *((f"speculative-draft-b{b}-{a}", "rooftile", "decode") for b in (1, 256) for a in ("none", "a0.60", "a0.80", "a0.90")),
        *(("adapters-5x16", f"rooftile, {way}", "serve") for way in ("base", "base, beside adapters", "16 adapters")),
        ("W1-first-3", "rooftile", "serve"),
        ("W1-first-3", "transformers, paged|sdpa", "serve"),
        ("W1-first-3", "transformers, paged|rooftile", "serve"),
    ]
    results.append(tmp_path / "rows.jsonl", [row.json() for row in rows])
    assert results.read(tmp_path / "rows.jsonl") == rows
    for row in rows:
        assert (row.suite, row.settings["model"], row.settings["scale"]) == ("engine", "tiny", SCALE)
        assert (row.commit, row.date, row.torch) == ("abc", SESSION.date, torch.__version__)
        assert (row.median_us is None) == bool(row.reason)


def _refused(row) -> bool:
    """Whether it is the row of our attention in a Transformers that batches with none but its own."""
    if row.backend != "transformers, paged|rooftile" or not peer.ONLY_ITS_OWN:
        return False
    assert row.reason == f"refused: Transformers {transformers.__version__} batches with no attention but its own"
    return True


def test_every_engine_gives_what_is_asked_for(rows) -> None:
    (w1,), (w10,) = named(["W1"], factor=SCALE), named(["W10"], factor=SCALE)
    due = {
        "W1-tiny-x0.02": sum(ask.params.max_tokens for ask in w1.requests),
        "W10-tiny-x0.02": w10.requests[0].params.max_tokens,
        "W11-tiny-x0.02": 12,
        "W1-first-3-tiny-x0.02": sum(ask.params.max_tokens for ask in w1.requests[:3]),
    }
    counted = [row for row in rows if row.case in due and not _refused(row)]
    assert len(counted) == 6 - peer.ONLY_ITS_OWN
    for row in counted:
        assert not row.reason
        assert row.measures["output_tokens"] == due[row.case]
        assert row.settings["as_asked"]
        assert row.measures["output_tok_s"] > 0


def test_the_peers_rows_say_how_they_were_run_and_compare_with_ours(rows) -> None:
    ours = rows[-3].measures["output_tok_s"]
    asked = [row for row in rows[-2:] if not _refused(row)]
    assert len(asked) == 2 - peer.ONLY_ITS_OWN
    for row in asked:
        ratio = ours / row.measures["output_tok_s"]
        assert row.measures["rooftile_over_this"] == pytest.approx(ratio, rel=1e-4)
        assert (row.settings["sampling"], row.measures["requests"]) == ("T = 0.6", 3)
        assert "stopped_at_s" not in row.settings
        assert row.settings["transformers"] == transformers.__version__
        assert row.settings["use_cuda_graph"] == [False, False]


def test_pages_and_reservations_answer_the_same_requests(rows) -> None:
    contiguous, paged = (row.measures for row in rows if row.case.startswith("W8"))
    assert contiguous["output_tokens"] == paged["output_tokens"] > 0
    assert contiguous["waste_percent"] > paged["waste_percent"]
    assert "output_tok_s_over_reserved" not in contiguous
    due = paged["output_tok_s"] / contiguous["output_tok_s"]
    assert paged["output_tok_s_over_reserved"] == pytest.approx(due, rel=1e-4)


def test_a_cpu_has_no_idle_time_and_no_first_run(rows) -> None:
    idle = next(row for row in rows if row.case.startswith("idle"))
    assert (idle.measures, idle.reason) == ({}, "refused: only a GPU has idle time")
    assert "first_run_s" not in rows[1].measures
    # the second process has made an engine all the same
    again = next(row for row in rows if row.case.startswith("start-again"))
    assert again.measures["compiled"] == 0
    assert again.settings == rows[0].settings


def test_parts_are_chosen_by_name_and_others_refused() -> None:
    (row,) = suite.measure(EngineOptions(model="tiny", scale=SCALE, parts=["W10"]), SESSION)
    assert row.case == "W10-tiny-x0.02"
    with pytest.raises(InvalidInput, match="bench engine has no case 'W2'; has start, W1, W10"):
        next(suite.measure(EngineOptions(model="tiny", parts=[*PARTS, "W2"]), SESSION))
    with pytest.raises(InvalidInput, match="runs is 0; must be at least 1"):
        next(suite.measure(EngineOptions(model="tiny", runs=0), SESSION))
    with pytest.raises(InvalidInput, match=r"model is '0\.6b'; bench engine has tiny, 1b, 8b"):
        next(suite.measure(EngineOptions(model="0.6b"), SESSION))


def hybrid() -> Decoder:
    """A layer of Mamba-2 and one of attention."""
    config = replace(
        MODELS["tiny"], family="rooftile", mixers=("mamba2", "attention"), feed_forwards=(None, "dense"),
        mamba2=Mamba2Sizes(heads=4, head_dim=16, state=32),
    )  # fmt: skip
    return Decoder.random(config, torch.float32, "cpu")


def test_contexts_are_decoded_without_their_prompts(monkeypatch) -> None:
    """The steps that are timed run the model on one token of each sequence, behind as many tokens as said."""
    decoder, read = hybrid(), []
    llm = contexts.engine_for(decoder, [300], 3)
    forward = decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda tokens, places, *more: read.append(places.tolist()) or forward(tokens, places, *more)
    )
    assert contexts.milliseconds(llm, 3, 300) > 0
    assert len(read) >= contexts.STEPS
    assert all(len(places) == 3 for places in read)
    # all have as many tokens: none decodes while others are read
    assert all(len(set(places)) == 1 for places in read)
    assert {places[0] for places in read} <= set(range(300 - contexts.STEPS, 300 + contexts.STEPS))
    assert llm.engine.scheduler.max_batched_tokens == 8192
    llm.engine.check_idle()
    # a state's numbers, and 19 blocks of 16 tokens with 2 keys and values of 16
    sizes = decoder.config.mamba2
    due = 4 * (sizes.heads * sizes.head_dim * sizes.state + sizes.convolved * (sizes.kernel - 1)) + 19 * 16 * 2 * 2 * 16 * 4
    assert contexts.sequence_bytes(llm, 300) == due
    assert contexts.most_sequences(llm, 300) >= 3
    # prompts are read again afterwards
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert any(places == [0, 1, 2] for places in read)
    assert len(output.outputs[0].token_ids) == 2


def test_contexts_that_do_not_fit_are_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(contexts, "most_sequences", lambda llm, context: 3 if context > 100 else 8)
    rows = list(suite.measure(EngineOptions(model="tiny", scale=SCALE, parts=["context"], runs=1, batch=4), SESSION))
    assert [row.case for row in rows] == [f"context-4x{length}-tiny-x0.02" for length in (33, 82, 328, 1311, 2621)]
    assert [row.reason for row in rows] == ["", "", *["refused: 3 sequences fit"] * 3]
    assert [row.samples for row in rows] == [1, 1, None, None, None] or rows[0].samples == 1
    assert rows[0].measures["output_tok_s"] > 0
    assert [row.measures["sequence_mb"] for row in rows[:2]] == [0.024576, 0.049152]


@pytest.mark.parametrize("name", ["attention-2.7b", "hybrid-2.7b", "mamba2-2.7b"])
def test_models_of_one_size(name: str) -> None:
    decoder = Decoder(MODELS[name], dtype=torch.bfloat16, device="meta")
    assert sum(weight.numel() for weight in decoder.parameters()) == pytest.approx(2.7e9, rel=0.06)
    assert MODELS[name].max_len == 262_144


def test_a_second_process_that_fails_is_a_reason(monkeypatch, capsys) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nRuntimeError: no room\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    again, idle = suite.measure(EngineOptions(model="tiny", scale=SCALE, parts=["idle"]), SESSION)
    assert again.reason == idle.reason == "failed with 1: RuntimeError: no room"
    assert idle.median_us is None
    assert "RuntimeError: no room" in capsys.readouterr().err


def test_a_peer_that_fails_is_a_reason_and_the_next_one_goes_on(monkeypatch, capsys) -> None:
    def answers(decoder, requests, one, limit_s):
        if one == "paged|sdpa":
            raise MemoryError("too large")
        return peer.Answers(output_tok_s=50.0, output_tokens=100, seconds=2.0)

    monkeypatch.setattr(peer, "answers", answers)
    ours, first, second = suite.measure(EngineOptions(model="tiny", scale=SCALE, parts=["peers"], peer_requests=2), SESSION)
    assert (first.reason, first.median_us) == ("failed: MemoryError: too large", None)
    assert second.measures["rooftile_over_this"] == pytest.approx(ours.measures["output_tok_s"] / 50.0, rel=1e-4)
    assert "MemoryError" in capsys.readouterr().err


# steps


def test_intervals_that_overlap_count_once() -> None:
    # 0-10 with 2-4 within it, 8-12 over its end, a gap, 20-21 and one that begins where it ends
    assert decode_step.busy_and_span([(20, 21), (0, 10), (2, 4), (8, 12), (21, 25)]) == (17, 25)
    assert decode_step.busy_and_span([(5, 9)]) == (4, 4)
    assert decode_step.busy_and_span([(100, 130), (110, 120), (125, 150)]) == (50, 50)


def test_idle_is_what_the_profilers_intervals_leave(monkeypatch) -> None:
    """Two steps, each a kernel of 3 ms and a copy that begins 1 ms before its end, and 2 ms of nothing between them."""
    ms = 1_000_000
    seen = [("kernel", 0, 3), ("Memcpy", 2, 4), ("cudaLaunchKernel", 4, 6), ("kernel", 6, 9), ("Memset", 8, 10)]
    events = [
        SimpleNamespace(
            name=lambda name=name: name, start_ns=lambda a=a: a * ms, end_ns=lambda b=b: b * ms,
            device_type=lambda name=name: DeviceType.CPU if name.startswith("cuda") else DeviceType.CUDA,
        )
        for name, a, b in seen
    ]  # fmt: skip

    class Profile:
        profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))

        def __init__(self, **_) -> None: ...

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None: ...

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    engine = LLM(decoder_named("tiny", torch.device("cpu")), max_model_len=64).engine
    found = decode_step.idle(engine, decode_step.DecodeSizes(2, 8, 2))
    assert found == {"busy_ms": 4.0, "profiled_ms": 5.0, "idle_percent": 20.0, "steps": 2, "events_per_step": 2}
    # the steps that were not profiled took 4.4 ms each: of these, 4 are work
    answer = {"start": {"seconds": 1.0, "compiled": 0, "settings": {}}, "idle": {"unprofiled_ms": 4.4} | found}
    monkeypatch.setattr(suite, "in_second_process", lambda *_: answer)
    _, row = suite.measure(EngineOptions(model="tiny", scale=SCALE, parts=["idle"]), SESSION)
    assert (row.median_us, row.measures["idle_percent_unprofiled"]) == (5000.0, pytest.approx(9.0909, abs=1e-3))
    events[:] = [event for event in events if event.name() == "cudaLaunchKernel"]
    with pytest.raises(RuntimeError, match=r"nothing run on the GPU, only \['cudaLaunchKernel'\]"):
        decode_step.idle(engine, decode_step.DecodeSizes(2, 8, 2))


def test_steps_are_taken_where_all_decode_and_contexts_are_as_said(decoder, monkeypatch) -> None:
    # each of the four prompts of 32 tokens is read in its own step
    engine = LLM(decoder, max_model_len=128, max_batched_tokens=36).engine
    plans: list[list[int]] = []
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda plan: plans.append([work.tokens for work in plan.work]) or run(plan))
    with decode_step.decoding(engine, decode_step.DecodeSizes(batch=4, context=40, steps=8)) as context:
        before, begun = context(), len(plans)
        assert 36 <= before < 37
        for n in range(8):
            engine.step()
            assert context() == before + n + 1
    assert plans[begun:] == [[1, 1, 1, 1]] * 8
    assert sum(plans[0]) > 4
    _, half_way = decode_step.milliseconds(engine, decode_step.DecodeSizes(batch=4, context=40, steps=8))
    assert half_way == pytest.approx(40, abs=1)
    assert engine.idle
    assert engine.pool.used_blocks == 0


def test_nobody_reads_a_prompt_while_steps_are_timed(decoder, monkeypatch) -> None:
    # prompts take so long that the first answers are past the context before the last one begins
    engine = LLM(decoder, max_model_len=128, max_batched_tokens=12).engine
    with decode_step.decoding(engine, decode_step.DecodeSizes(batch=4, context=40, steps=8)):
        run = engine.runner.run
        reads: list[int] = []
        monkeypatch.setattr(engine.runner, "run", lambda plan: reads.extend(work.tokens for work in plan.work) or run(plan))
        for _ in range(8):
            engine.step()
        assert reads == [1] * 32


def test_the_sizes_are_those_of_the_peers() -> None:
    assert decode_step.DecodeSizes.of() == (256, 640, 64)
    assert str(decode_step.DecodeSizes.of()) == "256x640"


# the peer


def test_the_peer_is_the_same_model(decoder) -> None:
    prompts = [list(range(5, 30)), list(range(100, 140))]
    ours = LLM(decoder, max_model_len=64).generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    model = peer.model_of(decoder)
    assert model.lm_head.weight.data_ptr() == decoder.embedding.data_ptr()
    for prompt, output in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert found == list(output.outputs[0].token_ids)
        assert len(set(found)) > 3


@pytest.mark.parametrize("name", ["1b", "8b"])
def test_its_positions_turn_as_ours_do(name: str) -> None:
    config = MODELS[name]
    made = peer.LlamaRotaryEmbedding(peer._config(config))
    torch.testing.assert_close(made.inv_freq, config.rotary.frequencies(config.max_len))
    with pytest.raises(Unsupported, match="family 'qwen3'; this peer has 'llama'"):
        peer._config(MODELS["0.6b"])


def test_it_samples_at_the_temperature_alone_and_never_ends_early(decoder) -> None:
    manager = peer.manager_of(peer.model_of(decoder), asks([5, 9]))
    (processor,) = manager.logit_processor.logits_processor
    assert processor.temperature == 0.6
    assert manager.generation_config.do_sample
    assert manager.generation_config.eos_token_id == -1
    assert manager.continuous_batching_config.num_blocks == 6


def test_it_is_stopped_at_the_limit_and_what_it_made_by_then_counts(decoder) -> None:
    found = peer.answers(decoder, asks([20, 30_000, 30_000]), SDPA, 2.0)
    assert (found.settings["stopped_at_s"], found.seconds, found.as_asked, found.reason) == (2.0, 2.0, False, "")
    assert 20 < found.output_tokens < 60_020
    assert found.output_tok_s == pytest.approx(found.output_tokens / 2.0, abs=0.1)


def test_tokens_after_the_limit_do_not_count(monkeypatch) -> None:
    """Three requests at the time limit: one is complete, one is cut off with a token after the limit, one has not begun."""

    class Manager:
        def __init__(self) -> None:
            self.running = True
            self.results = [SimpleNamespace(request_id="r0", timestamps=[102.0, 103.0], error=None)]

        def add_request(self, prompt, **_) -> str:
            return f"r{prompt[0]}"

        def is_running(self) -> bool:
            return self.running

        def stop(self, *, hard_stop: bool) -> None:
            self.running = not hard_stop
            self.results = [SimpleNamespace(request_id="r1", timestamps=[103.0, 104.0, 104.5, 106.0], error="stopped")]

        def get_result(self, timeout: float):
            now[0] += timeout
            return self.results.pop() if self.results else None

    now = [100.0]
    monkeypatch.setattr(peer.time, "perf_counter", lambda: now[0])
    found = peer.answered(Manager(), [([0], 2), ([1], 9), ([2], 9)], 5.0)
    assert found == ([2, 3, 0], 5.0, True, "")
    now[0] = 100.0
    assert peer.answered(Manager(), [([0], 2)], 5.0) == ([2], 3.0, False, "")


def test_a_run_before_that_does_not_end_is_a_reason(decoder) -> None:
    found = peer.answers(decoder, asks([20, 20]), SDPA, 0.0)
    assert found == peer.Answers(reason="the first run, of 16 tokens per answer, did not end in 0.0 s")


def test_a_peer_whose_steps_fail_says_so(decoder, monkeypatch) -> None:
    def broken(*_, **__):
        raise ValueError("no such kernel")

    monkeypatch.setattr(decoder_model := peer.model_of(decoder), "forward", broken)
    monkeypatch.setattr(peer, "model_of", lambda _: decoder_model)
    found = peer.answers(decoder, asks([5, 5]), SDPA, 20.0)
    assert found == peer.Answers(reason="no such kernel")
