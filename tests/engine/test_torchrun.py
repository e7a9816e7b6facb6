"""An engine on ranks of torchrun's own: two agents on this machine are two machines to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import transformers

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.ranks import machines
from rooftile.engine.ranks import place as places
from rooftile.engine.ranks.failures import RankEnded
from rooftile.engine.ranks.lines import Line, Lines, Progress, Told
from rooftile.engine.ranks.place import Place
from rooftile.errors import InvalidInput
from tests.engine.folders import save
from tests.models.checkpoints import SMALL, saved

ROOT = Path(__file__).parents[2]
SECONDS = 120
SETTINGS = ("--tp", "2", "--dtype", "fp32", "--device", "cpu", "--max-model-len", "64", "--num-blocks", "40")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL | {"vocab_size": 420, "eos_token_id": 419})
    saved(transformers.AutoModelForCausalLM.from_config(config), path)
    return save("byte_level", path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def agents(nodes: int, each: int, *program: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts agents of torchrun, with `each` processes; none of them is left at the end."""
    words = [
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        str(each),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", *words, "--node-rank", str(node), *program],
                    env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )
            for node in range(nodes)
        ]  # fmt: skip
        try:
            yield started
        finally:
            for one in started:
                for child in psutil.Process(one.pid).children(recursive=True) if one.poll() is None else ():
                    child.kill()
                one.kill()


def test_an_llm_on_two_machines(folder: Path, tmp_path: Path) -> None:
    """Rank 1 serves inside LLM(...) until rank 0 ends, and runs no line behind it."""
    script = tmp_path / "answer.py"
    script.write_text(
        textwrap.dedent(f"""
        from rooftile.engine import LLM, SamplingParams

        llm = LLM({str(folder)!r}, tensor_parallel_size=2, dtype="fp32", max_model_len=64, num_blocks=40)
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        print([o.outputs[0].token_ids for o in llm.generate([[1, 2, 3], [4] * 20], params)])
    """)
    )
    with agents(2, 1, str(script)) as started:
        (said, errors), (other, other_errors) = (one.communicate(timeout=SECONDS) for one in started)
    assert [one.returncode for one in started] == [0, 0], errors + other_errors
    llm = LLM(folder, dtype="fp32", max_model_len=64, num_blocks=40)
    due = llm.generate([[1, 2, 3], [4] * 20], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert said == f"{[output.outputs[0].token_ids for output in due]}\n"
    assert other == ""


@pytest.mark.sweep
def test_generate_on_two_ranks_of_one_machine(folder: Path) -> None:
    words = ("-p", "the roof", "--temperature", "0", "--max-tokens", "9", *SETTINGS)
    with agents(1, 2, "-m", "rooftile", "generate", str(folder), *words) as (agent,):
        said, errors = agent.communicate(timeout=SECONDS)
    assert agent.returncode == 0, errors
    llm = LLM(folder, dtype="fp32", max_model_len=64, num_blocks=40)
    due = llm.generate(["the roof"], SamplingParams(temperature=0, max_tokens=9))
    assert said == f"{due[0].outputs[0].text}\n"


def ranks_of(agent: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(agent.pid).children(recursive=True)


def test_a_server_whose_rank_is_killed(folder: Path) -> None:
    """Rank 0 answers HTTP alone. It has nothing to do when rank 1 dies, and ends with a sentence all the same."""
    port = free_port()
    with agents(2, 1, "-m", "rooftile", "serve", str(folder), "--port", str(port), *SETTINGS) as started:
        body = {"prompt": "the roof", "max_tokens": 5, "temperature": 0}
        answer = {}
        until = time.monotonic() + SECONDS
        while not answer:
            assert time.monotonic() < until
            assert [one.poll() for one in started] == [None, None]
            try:
                asked = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                answer = json.load(urllib.request.urlopen(asked, timeout=SECONDS))
            except OSError:
                time.sleep(0.2)  # it does not listen yet, or reads the model
        llm = LLM(folder, dtype="fp32", max_model_len=64, num_blocks=40)
        due = llm.generate(["the roof"], SamplingParams(temperature=0, max_tokens=5))[0].outputs[0].text
        assert answer["choices"][0]["text"] == due
        left = ranks_of(started[0])
        (rank_1,) = ranks_of(started[1])
        rank_1.send_signal(signal.SIGKILL)
        (_, errors), _ = (one.communicate(timeout=SECONDS) for one in started)
        assert [one.returncode for one in started] == [1, 1]
        assert "rank 1 of 2 has ended" in errors
        assert not any(process.is_running() for process in left)


GIVEN = [Place(rank, 3, 0, 3, dist.HashStore) for rank in range(3)]


def test_lines_say_how_far_ranks_are_and_why_they_end() -> None:
    store, ended, gone = dist.HashStore(), [], []
    with ThreadPoolExecutor(4) as threads:
        waiting = threads.submit(machines.lines_to_all, store, GIVEN[0], lambda *found: ended.append(found))
        told = json.loads(store.get(machines._LISTENS))
        # a stranger without the secret, and one that says nothing
        with socket.create_connection((told["host"], told["port"])) as stranger:
            stranger.sendall(b"0" * machines._INTRODUCTION)
            assert stranger.recv(1) == b""
        with socket.create_connection((told["host"], told["port"])):
            pass
        first = machines.line_to_first(store, GIVEN[1], gone.append)
        machines.line_to_first(store, GIVEN[2], gone.append)
        lines = waiting.result(SECONDS)
        with first.reporting(lambda: Progress(7, 90)):
            assert lines.progress(30.0) == {1: Progress(7, 90), 2: Progress(0, 0)}
        first.tell(InvalidInput("no folder here"))
        wait_until(lambda: ended)
        ((rank, why),) = ended
        assert (rank, why) == (1, Told("InvalidInput", "no folder here"))
        assert (type(why.error(1, 3)), str(why.error(1, 3))) == (InvalidInput, "rank 1 of 3: no folder here")
        lines.say_goodbye()
        lines.close()
        wait_until(lambda: len(gone) == 2)
        assert gone == [True, True]


def test_the_end_of_a_process_without_a_word() -> None:
    pairs, ended, gone = [socket.socketpair() for _ in range(2)], [], []
    lines = Lines([Connection(ours.detach()) for ours, _ in pairs], lambda *found: ended.append(found))
    Line(Connection(pairs[0][1].detach()), gone.append)
    # a rank that does not answer
    assert lines.progress(0.3) == {1: Progress(0, 0)}
    pairs[1][1].close()
    wait_until(lambda: ended)
    assert ended == [(2, None)]
    lines.close()
    wait_until(lambda: gone)
    assert gone == [False]


def test_a_refusal_is_heard_before_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for refusing, hearing in ((2, 0), (0, 1)):
        store = dist.HashStore()
        monkeypatch.setenv("RANK", str(refusing))
        monkeypatch.setattr(places, "_torchruns", lambda store=store: store)
        with pytest.raises(InvalidInput, match=r"^no folder here$"), machines.telling_ranks(3):
            raise InvalidInput("no folder here")
        meet = machines.line_to_first if hearing else machines.lines_to_all
        with pytest.raises(InvalidInput, match=f"^rank {refusing} of 3: no folder here$"):
            meet(store, GIVEN[hearing], lambda *found: None)
    monkeypatch.setattr(machines, "MEETING_S", 0.1)
    with pytest.raises(RankEnded, match=r"^rank 1 of 3 has not come within 0 s$"):
        machines.lines_to_all(dist.HashStore(), GIVEN[0], lambda *found: None)
    with pytest.raises(RankEnded, match=r"^rank 0 of 3 has not come within 0 s"):
        machines.line_to_first(dist.HashStore(), GIVEN[1], lambda *found: None)


def wait_until(true) -> None:
    until = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)
