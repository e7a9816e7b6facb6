"""An engine on several ranks gives the tokens of one, and ends with a sentence where a rank ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from rooftile.engine import LLM, AsyncEngine, RequestOutput, SamplingParams
from rooftile.engine.ranks import group, opening
from rooftile.engine.ranks.failures import RankEnded
from rooftile.engine.ranks.leader import Leader
from rooftile.engine.ranks.leading_runner import LeadingRunner
from rooftile.engine.ranks.lines import Progress
from rooftile.engine.ranks.meeting import hosted, open_port
from rooftile.engine.ranks.place import Place, placed
from rooftile.engine.start import build
from rooftile.errors import InvalidInput
from rooftile.models import Decoder
from tests.engine.asking import assert_clean, prompts
from tests.models.checkpoints import SMALL, saved

# chunks, more requests than run at once, and so few blocks that some are preempted
CROWDED: dict[str, Any] = {
    "dtype": "fp32", "block_size": 8, "max_model_len": 96, "num_blocks": 16, "max_batched_tokens": 13, "max_num_seqs": 6,
    "seed": 3,
}  # fmt: skip
ROOMY: dict[str, Any] = {"dtype": "fp32", "max_model_len": 96, "num_blocks": 99, "seed": 3}
ENDLESS = {"ignore_eos": True, "max_tokens": 9}
ASKED = [
    SamplingParams(temperature=0, **ENDLESS),
    SamplingParams(n=4, seed=5, **ENDLESS),
    SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, **ENDLESS),
    SamplingParams(beam_width=4, n=2, **ENDLESS),
    SamplingParams(frequency_penalty=0.5, repetition_penalty=1.3, top_k=20, **ENDLESS),
    SamplingParams(temperature=0, logit_bias={7: 3.0, 8: -9.0}, min_p=0.1, **ENDLESS),
    SamplingParams(allowed_token_ids=[5, 6, 7, 8], top_p=0.8, logprobs=0, **ENDLESS),
    SamplingParams(temperature=0, min_tokens=5, max_tokens=9, stop_token_ids=list(range(0, 96, 6))),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return Path(saved(model, tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def two(folder: Path) -> LLM:
    return LLM(folder, tensor_parallel_size=2, **CROWDED)


def workers(llm: LLM) -> list[subprocess.Popen[bytes]]:
    runner: Any = llm.engine.runner
    found: list[subprocess.Popen[bytes]] = runner.leader.processes._processes
    return found


def assert_same(found: list[RequestOutput], due: list[RequestOutput]) -> None:
    """Tokens are the same, and logprobs within 1e-4."""
    for one, other in zip(found, due, strict=True):
        assert (one.error, one.num_cached_tokens) == (None, other.num_cached_tokens)
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            assert_near(mine.logprobs, its.logprobs)
        assert_near(one.prompt_logprobs, other.prompt_logprobs)


def assert_near(found: Any, due: Any) -> None:
    assert (found is None) == (due is None)
    for mine, its in zip(found or (), due or (), strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            assert {token: one.logprob for token, one in mine.items()} == pytest.approx(
                {token: one.logprob for token, one in its.items()}, abs=1e-4
            )


def test_tokens_are_those_of_one_rank(folder: Path, two: LLM) -> None:
    """Mixed requests, twice, so that the second time prefixes are found; the ranks compare their tokens on the way."""
    one, asked = LLM(folder, **CROWDED), prompts(16)
    for _ in range(2):
        assert_same(two.generate(asked, ASKED * 2), one.generate(asked, ASKED * 2))
    assert two.engine.scheduler.preemptions == one.engine.scheduler.preemptions > 0
    longest = max(asked, key=len)
    once, again = (two.generate(longest, ASKED[0])[0] for _ in range(2))
    assert again.num_cached_tokens > len(longest) // 2
    assert again.outputs[0].token_ids == once.outputs[0].token_ids
    assert_clean(two)
    # a caller that leaves ends its request
    stream = two.stream(asked[0], ASKED[0])
    next(stream)
    stream.close()
    assert_clean(two)


def test_callers_of_an_async_engine(two: LLM) -> None:
    """Another thread runs the steps then; the one that is cancelled ends alone."""

    async def ask() -> list[list[int]]:
        async with AsyncEngine(two) as engine:
            tasks = [asyncio.create_task(engine.complete(prompt, ASKED[0])) for prompt in prompts(3)]
            left = asyncio.create_task(engine.complete([3] * 50, SamplingParams(max_tokens=40, ignore_eos=True)))
            await asyncio.sleep(0.05)
            left.cancel()
            return [output.outputs[0].token_ids for output in await asyncio.gather(*tasks)]

    assert asyncio.run(ask()) == [output.outputs[0].token_ids for output in two.generate(prompts(3), ASKED[0])]


def test_a_rank_that_is_killed_in_a_step_fails_what_runs(two: LLM) -> None:
    """The last test of this engine."""
    running, (worker,), found = threading.Event(), workers(two), []

    def ask() -> None:
        try:
            while True:
                for _ in two.stream(prompts(6), SamplingParams(max_tokens=30, ignore_eos=True)):
                    running.set()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert running.wait(300)
    worker.kill()
    thread.join(60)
    assert not thread.is_alive()
    assert [(type(error), str(error)) for error in found] == [(RankEnded, "rank 1 of 2 has ended (signal 9)")]
    with pytest.raises(RankEnded, match=r"^rank 1 of 2 has ended \(signal 9\)$"):
        two.generate([1, 2, 3])
    assert two.engine.idle
    two.close()
    with pytest.raises(InvalidInput, match="the LLM was closed; make another"):
        two.generate([1, 2, 3])


def test_four_ranks_and_an_fp8_cache(folder: Path) -> None:
    """Two ranks hold the same head of keys; the end of the last reference ends the processes."""
    asked, settings = prompts(8), ROOMY | {"kv_dtype": "fp8"}
    llm = LLM(folder, tensor_parallel_size=4, **settings)
    assert_same(llm.generate(asked, ASKED), LLM(folder, **settings).generate(asked, ASKED))
    assert llm.pages.storage.shape[4] == 1
    started, meeting = workers(llm), llm.engine.runner.leader.processes.meeting
    assert [process.poll() for process in started] == [None] * 3
    del llm
    gc.collect()
    assert [process.poll() for process in started] == [0] * 3
    assert not meeting.parent.exists()


def test_ranks_that_hold_whole_experts(tmp_path: Path) -> None:
    """By default where slices of them do not fit, as here of 23 columns."""
    config = transformers.MixtralConfig(**SMALL | {"intermediate_size": 23}, num_local_experts=4)
    path = Path(saved(transformers.AutoModelForCausalLM.from_config(config).eval(), tmp_path))
    two = LLM(path, tensor_parallel_size=2, **ROOMY)
    assert two.engine.runner.decoder.config.experts.held == 2
    assert_same(two.generate(prompts(8), ASKED), LLM(path, **ROOMY).generate(prompts(8), ASKED))
    two.close()


def test_a_rank_that_ends_while_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[opening.WorkerProcesses] = []

    class Noted(opening.WorkerProcesses):
        def __init__(self, *given: Any) -> None:
            started.append(self)
            super().__init__(*given)

    read = Decoder.from_folder

    def killed_first(*given: Any, **named: Any) -> Decoder:
        (worker,) = started[0]._processes
        worker.kill()
        while started[0].meeting.parent.exists():
            time.sleep(0.01)  # until its end is noticed
        read(*given, **named)
        raise AssertionError("the weights were read to their end")

    monkeypatch.setattr(opening, "WorkerProcesses", Noted)
    monkeypatch.setattr(build.Decoder, "from_folder", killed_first)
    with pytest.raises(RankEnded, match=r"^rank 1 of 2 has ended \(signal 9\)$"):
        LLM(folder, tensor_parallel_size=2, **ROOMY)
    assert not started[0].meeting.parent.exists()


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_a_rank_that_hangs(pause_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before it listens for the first step: gloo would wait to send that."""
    monkeypatch.setattr(group, "LIMIT_S", 2.0)
    llm = LLM(folder, tensor_parallel_size=2, **ROOMY)
    (worker,) = workers(llm)
    time.sleep(pause_s)
    worker.send_signal(signal.SIGSTOP)
    with pytest.raises(RankEnded, match=r"^rank 1 of 2 has not ended .* within 2 s: its process does not answer$"):
        llm.generate([1, 2, 3])
    assert worker.poll() == -signal.SIGKILL


def test_the_rank_that_is_behind_is_named() -> None:
    """Among three that answer, and where one does not."""
    leader = Leader(3)
    leader.group = SimpleNamespace(limit_s=9.0, progress=lambda: Progress(8, 70), abort=lambda: None)  # type: ignore[assignment]
    late = "has not ended its part of a step within 9 s"
    for found, sentence in (
        ({1: Progress(8, 70), 2: Progress(8, 68)}, f"rank 2 of 3 {late}: it has begun 68 sums, another rank 70"),
        ({1: Progress(7, 66), 2: Progress(8, 71)}, f"rank 1 of 3 {late}: it has begun 7 orders, another rank 8"),
        ({2: Progress(8, 68)}, f"rank 1 of 3 {late}: its process does not answer"),
        (
            {1: Progress(8, 70), 2: Progress(8, 70)},
            f"a rank of 3 {late}; all have begun the same sum, so a device or the link hangs",
        ),
    ):
        leader.lines = SimpleNamespace(progress=lambda limit_s, found=found: dict(found))  # type: ignore[assignment]
        assert str(leader._late()) == sentence


def test_ranks_that_draw_different_tokens() -> None:
    leader = Leader(2)
    leader.group = SimpleNamespace(limit_s=1.0, abort=lambda: None)  # type: ignore[assignment]
    leader.wait_for(None, torch.tensor([[7, 7]]))
    for _ in range(2):
        with pytest.raises(RankEnded, match=r"the 2 ranks have drawn different tokens; their checksums are \[7, 8\]"):
            leader.wait_for(None, torch.tensor([[7, 8]]))


def program(folder: Path, what: str) -> list[str]:
    """A program that makes an LLM of two ranks and goes on with it."""
    lines = f"""
        import sys
        from rooftile.engine import LLM, SamplingParams
        llm = LLM({str(folder)!r}, tensor_parallel_size=2, dtype="fp32", max_model_len=96, num_blocks=99)
    """
    return [sys.executable, "-c", textwrap.dedent(lines) + what]


def test_no_rank_outlives_rank_0(folder: Path) -> None:
    what = "print(llm.engine.runner.leader.processes._processes[0].pid, flush=True)\nsys.stdin.read()"
    with subprocess.Popen(program(folder, what), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None
        pid = int(made.stdout.readline())
        os.kill(pid, 0)
        made.kill()
    for _ in range(600):
        # an orphan is reaped by whoever adopts it
        state = Path(f"/proc/{pid}/stat").read_text().split()[2] if Path(f"/proc/{pid}").exists() else "X"
        if state in "XZ":
            return
        time.sleep(0.1)
    raise AssertionError("the worker goes on without its parent")


def test_ranks_that_somebody_else_starts_and_watches(folder: Path) -> None:
    """A cluster's scheduler would: rank 0 waits for its word when a rank has broken a collective."""
    lines = f"""
        import sys
        from rooftile.engine import LLM
        from rooftile.engine.ranks.meeting import joined
        from rooftile.engine.ranks.place import placed
        with placed(joined("127.0.0.1", int(sys.argv[1]), 1, 2, "127.0.0.1")):
            LLM({str(folder)!r}, tensor_parallel_size=2, **{ROOMY})
    """
    with open_port("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        other = subprocess.Popen([sys.executable, "-c", textwrap.dedent(lines), str(port)])
        with placed(hosted(listener, 2)):
            llm = LLM(folder, tensor_parallel_size=2, **ROOMY)
    assert Place.found() is None
    asked, runner = prompts(4), llm.engine.runner
    assert isinstance(runner, LeadingRunner)
    assert runner.leader.processes is None
    assert_same(llm.generate(asked, ASKED[:4]), LLM(folder, **ROOMY).generate(asked, ASKED[:4]))
    other.kill()
    assert other.wait() == -signal.SIGKILL
    word = threading.Timer(0.5, runner.leader.fail, [RankEnded("rank 1 of 2 has ended (its machine has)")])
    word.start()
    with pytest.raises(RankEnded, match=r"^rank 1 of 2 has ended \(its machine has\)$"):
        llm.generate(asked, ASKED[0])
    word.join()


def test_what_several_ranks_refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    monkeypatch.setattr(opening, "WorkerProcesses", None)
    with pytest.raises(
        InvalidInput, match=r"3 ranks are to share the model, which has 4 heads of attention; give it to 1 or 2 or 4"
    ):
        LLM(folder, tensor_parallel_size=3)
    with pytest.raises(InvalidInput, match="enable_expert_parallel is True and the model has no experts; leave it out"):
        LLM(folder, tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(InvalidInput, match="enable_expert_parallel is True and tensor_parallel_size is 1"):
        LLM(folder, enable_expert_parallel=True)
    for wrong in (0, -1, True, 2.0, "2", 65):
        with pytest.raises(InvalidInput, match="tensor_parallel_size is"):
            LLM(folder, tensor_parallel_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="a decoder is given, which is whole; give a checkpoint's folder"):
        LLM(Decoder.from_folder(folder), tensor_parallel_size=2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidInput, match="tensor_parallel_size is 2, and torchrun has started 4 ranks; make them equal"):
        LLM(folder, tensor_parallel_size=2)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        InvalidInput, match="tensor_parallel_size is 2, so 2 GPUs are needed on this machine, and PyTorch finds 1"
    ):
        LLM(folder, tensor_parallel_size=2)
    with pytest.raises(
        InvalidInput, match=r"device is cuda:0 and tensor_parallel_size is 2: rank r takes cuda:r; leave device out"
    ):
        LLM(folder, tensor_parallel_size=2, device="cuda:0")
