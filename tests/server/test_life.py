"""The end of a server, of its engine, and of what they were doing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rooftile.errors import InvalidInput
from rooftile.server import limits
from rooftile.server.engine.messages import FAILED, Ready, Report
from rooftile.server.engine.wire import FrameReader
from rooftile.server.observe.log import WAITING_LINES, AccessRecord, _LineFormatter, _Queued, _Quiet, log_request
from rooftile.server.server_run import SPARE_FILES, ServerRun, allow_files, bind
from rooftile.server.settings import ServerSettings
from tests.server.living import PATIENCE_S, living


def engine_process(folder: Path, *, stderr: int | None = None, **settings: Any) -> tuple[socket.socket, subprocess.Popen]:
    """Returns our end of the connection to an engine's process, and the process."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "rooftile.server.engine.process", str(theirs.fileno())], stdin=subprocess.PIPE, stderr=stderr,
        pass_fds=(theirs.fileno(),), env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    theirs.close()
    assert process.stdin is not None
    process.stdin.write(json.dumps({"model": str(folder), "device": "cpu", "num_blocks": 20} | settings).encode())
    process.stdin.close()
    process.stdin = None
    ours.settimeout(PATIENCE_S)
    return ours, process


def wait_until_ready(ours: socket.socket) -> list[Report]:
    """Returns what the engine has said until it was ready."""
    reader: FrameReader[Report] = FrameReader(Report)
    said: list[Report] = []
    while not any(isinstance(message, Ready) for message in said):
        said += reader.feed(ours.recv(65536))
    return said


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, PATIENCE_S))


def test_sigterm_drains(folder) -> None:
    """Lets running requests finish, sends new ones away, tells those that are late, and exits with 0."""

    async def test() -> None:
        async with living(folder, ready=False, drain_s=3.0) as it:
            first = await it.client.get("/health")
            assert first.status_code == 503
            assert "the model is being read" in first.json()["error"]["message"]
            assert first.headers["retry-after"]
            await it.ready()
            # on any machine one of these ends in time and the other does not
            short_begun, long_begun = asyncio.Event(), asyncio.Event()
            short = asyncio.create_task(it.stream(short_begun, max_tokens=40))
            long = asyncio.create_task(it.stream(long_begun, max_tokens=8000, n=4))
            await short_begun.wait()
            await long_begun.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
            for path in ("/health", "/v1/models"):
                answer = await it.client.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
            *_, end, done = await short
            assert done == "[DONE]"
            assert end["choices"][0]["finish_reason"] == "length"
            *_, told, done = await long
            assert done == "[DONE]"
            assert told["error"]["code"] == "shutting_down"
            assert await it.life == 0
            assert it.engine.process.poll() == 0
            with pytest.raises(httpx.ConnectError):
                await it.client.get("/health")

    run(test())


def test_a_second_signal_ends_at_once(folder, monkeypatch) -> None:
    ended = []
    monkeypatch.setattr("rooftile.server.server_run.os._exit", lambda code: ended.append(code))

    async def test() -> None:
        async with living(folder, ready=False) as it:
            while it.engine is None:
                await asyncio.sleep(0.02)
            it.run._on_signal()
            assert ended == []
            it.run._on_signal()
            assert ended == [1]
            await asyncio.to_thread(it.engine.process.wait, 5)

    run(test())


def test_an_end_does_not_wait_for_a_model_that_is_being_read(folder, monkeypatch) -> None:
    monkeypatch.setattr("rooftile.server.engine.remote.GONE_S", PATIENCE_S)

    async def test() -> None:
        async with living(folder, ready=False) as it:
            while it.engine is None:
                await asyncio.sleep(0.02)
            it.run._on_signal()
            assert await it.life == 0
            assert it.engine.ready is None
            assert it.engine.process.returncode == -signal.SIGKILL

    run(test())


def test_a_killed_engine_is_noticed_by_all(folder, monkeypatch) -> None:
    monkeypatch.setenv("ROOFTILE_API_KEY", "k" * 16)

    async def test() -> None:
        async with living(folder) as it:
            process = it.engine.process
            assert os.getsid(process.pid) == process.pid, "Ctrl-C on a terminal would reach the engine, too"
            environment = Path(f"/proc/{process.pid}/environ")
            assert not environment.exists() or b"ROOFTILE_API_KEY" not in environment.read_bytes()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                process.send_signal(number)
            begun = [asyncio.Event() for _ in range(50)]
            streams = [asyncio.create_task(it.stream(each, max_tokens=2000)) for each in begun]
            whole = asyncio.create_task(
                it.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2000, "ignore_eos": True})
            )
            await asyncio.gather(*(each.wait() for each in begun))
            process.kill()
            killed = time.monotonic()
            for events in await asyncio.gather(*streams):
                assert events[-1] == "[DONE]"
                assert events[-2]["error"]["code"] == "engine_down"
                assert "by signal 9" in events[-2]["error"]["message"]
            answer = await whole
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
            health = await it.client.get("/health")
            assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_down")
            assert await it.life == FAILED
            assert time.monotonic() - killed < 30

    run(test())


def test_a_step_that_does_not_end_is_a_dead_engine(folder) -> None:
    async def test() -> None:
        async with living(folder, stall_s=1.0) as it:
            # an idle engine is silent, and not dead
            await asyncio.sleep(1.5)
            begun = asyncio.Event()
            stream = asyncio.create_task(it.stream(begun, max_tokens=2000))
            await begun.wait()
            it.engine.process.send_signal(signal.SIGSTOP)
            *_, told, _ = await stream
            assert "has not ended (--stall)" in told["error"]["message"]
            assert await it.life == FAILED

    run(test())


def test_a_model_that_cannot_be_read_ends_the_server(tmp_path) -> None:
    async def test() -> None:
        async with living(tmp_path / "none", ready=False) as it:
            assert await it.life == 2
            assert "is not a folder" in it.engine.detail
            assert it.engine.cause == "the model could not be read; the server's log says why"

    run(test())


def test_the_engine_ends_with_its_server(folder) -> None:
    """When the server dies, the kernel closes its end of the socket, whatever killed it."""
    ours, process = engine_process(folder)
    said = wait_until_ready(ours)
    assert [message.percent for message in said[:-1]] == sorted({message.percent for message in said[:-1]})
    assert said[-2].percent == 100
    ours.close()
    assert process.wait(PATIENCE_S) == 0


def test_garbage_on_the_wire_ends_the_engine_and_says_why(folder) -> None:
    async def test() -> None:
        async with living(folder) as it:
            it.engine._write(b"\xff\xff\xff\xff")
            assert await it.life == FAILED
            assert "a frame says that it has 4,294,967,295 bytes" in it.engine.detail
            assert it.engine.cause == "the engine has failed; the server's log says why"

    run(test())


def test_news_that_the_server_cannot_take_ends_it_and_says_why(folder, monkeypatch) -> None:
    """An error in the task that reads the engine's messages must not end that task in silence."""

    async def test() -> None:
        async with living(folder) as it:

            def broken(state):
                raise KeyError("a mistake of ours")

            monkeypatch.setattr(it.engine, "_hand_out", broken)
            answer = await it.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
            assert await it.life == FAILED
            # the kind of error is for the log
            assert it.engine.cause == "a message of the engine could not be taken"
            assert it.engine.detail == "a message of the engine could not be taken: KeyError"
            assert "KeyError" not in answer.text

    run(test())


def test_a_taken_port_is_a_sentence() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"port {port} is taken; give another one with --port"):
            bind("127.0.0.1", port)
    # free again at once
    bind("127.0.0.1", port).close()
    with pytest.raises(InvalidInput, match="cannot be listened on"):
        bind("203.0.113.5", port)
    with pytest.raises(InvalidInput, match=r"cannot be listened on: \w"):
        bind("a" * 300 + "\u00e9", port)


def test_files_are_allowed_for_all_connections(monkeypatch) -> None:
    """A thousand files are usual, and fewer than the connections that the server takes."""
    found = []
    monkeypatch.setattr("resource.setrlimit", lambda kind, pair: found.append(pair))
    due = limits.CONNECTIONS + SPARE_FILES
    for limit in ((1024, 1 << 20), (1024, -1), (1024, 2000), (due, due), (-1, -1)):
        monkeypatch.setattr("resource.getrlimit", lambda kind, limit=limit: limit)
        allow_files()
    assert found == [(due, 1 << 20), (due, -1), (2000, 2000)]


def test_a_lack_of_files_is_one_line(caplog) -> None:
    """asyncio tells it with a stack for each of a thousand connections, every second."""

    async def test() -> None:
        alive = ServerRun(ServerSettings(model="m"), socket.socket())
        for _ in range(1000):
            alive._note_error(asyncio.get_running_loop(), {"message": "", "exception": OSError(errno.EMFILE, "too many")})
        assert len(caplog.records) == 1
        assert "ulimit" in caplog.text
        alive._note_error(asyncio.get_running_loop(), {"message": "another", "exception": OSError(errno.EIO, "odd")})
        assert "another" in caplog.text
        alive._listener.close()

    run(test())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_loses_lines_and_nothing_else(monkeypatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", True)
    log = logging.getLogger("rooftile.server")
    full = Path("/dev/full").open("w")  # noqa: SIM115
    handler = _Quiet(full)
    log.addHandler(handler)
    monkeypatch.setattr(log, "level", logging.INFO)
    try:
        for _ in range(3):
            log_request(AccessRecord(id="x" * 100_000))
    finally:
        log.removeHandler(handler)
        with contextlib.suppress(OSError):
            full.close()


def test_a_log_that_nobody_reads_holds_up_nobody() -> None:
    """A pipe to a program that stands still, as a terminal that is scrolled back: writing to it would wait for ever."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        handler = _Queued(_Quiet(pipe))
        record = logging.makeLogRecord({"msg": "x" * 10_000})
        many = threading.Thread(target=lambda: [handler.emit(record) for _ in range(WAITING_LINES + 100)], daemon=True)
        many.start()
        many.join(PATIENCE_S)
        assert not many.is_alive()
        # the thread that writes is let go
        read = 0
        while read < 10_001 * WAITING_LINES:
            read += len(os.read(reading, 1 << 20))
        handler.flush()
    os.close(reading)


def test_the_log_of_an_engine_that_fails_is_json_too(folder) -> None:
    """Its traceback is in one line: who reads the log of --json reads JSON and nothing else."""
    ours, process = engine_process(folder, stderr=subprocess.PIPE, json_log=True)
    with ours:
        wait_until_ready(ours)
        ours.sendall(b"\xff\xff\xff\xff")
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == FAILED
    (line,) = (json.loads(each) for each in said.splitlines())
    assert line["level"] == "error"
    assert "WireError" in line["message"]
    assert "Traceback" in line["message"]


def test_a_server_that_listens_no_more_ends(folder, caplog) -> None:
    async def test() -> None:
        async with living(folder) as it:
            # uvicorn ends by itself, as it does where its own loop fails
            it.run._server.should_exit = True
            assert await it.life == FAILED

    run(test())
    assert "the server listens no more" in caplog.text


@pytest.mark.parametrize("as_json", [True, False])
def test_a_clients_words_begin_no_line(as_json) -> None:
    record = logging.makeLogRecord(
        {"msg": "request\nfake", "said": AccessRecord(path='/a\n"x', key="ann", prompt_tokens=3).line()}
    )
    line = _LineFormatter(as_json=as_json).format(record)
    assert "\n" not in line
    if as_json:
        assert json.loads(line)["key"] == "ann"
        assert json.loads(line)["prompt_tokens"] == 3


def test_nothing_is_left_behind() -> None:
    # The server that other tests share has its engine as a child of its own. A process that has ended, collected or not, has no
    # command here.
    children = [each.info for each in psutil.process_iter(["ppid", "cmdline"]) if each.info["ppid"] == os.getpid()]
    assert [each for each in children if "engine.process" in " ".join(each["cmdline"] or ())] == []
