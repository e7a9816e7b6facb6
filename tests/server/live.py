"""A server in a process of its own, on a free port of this machine, and a client for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
# no test waits longer for anything
PATIENCE_S = 240.0
SETTINGS = ("--device", "cpu", "--num-blocks", "600", "--max-num-seqs", "32", "--max-model-len", "2048")


class Server:
    """`rooftile serve` with a folder; ends with `close`, whatever has happened."""

    def __init__(self, folder: Path | str, *options: str, env: dict[str, str] | None = None, wait: bool = True) -> None:
        self.lines: list[str] = []
        self.name = Path(folder).name
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rooftile", "serve", str(folder), "--port", "0", *SETTINGS, *options],
            cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (env or {}), start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for(r"listening on (http://\S+);")
        self.port = int(self.url.rpartition(":")[2])
        if wait:
            self.wait_for(r"(ready): ")
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, pattern: str) -> str:
        """Returns the first group of a pattern in the log; waits for it."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            found = re.search(pattern, "".join(self.lines))
            if found:
                return found[1]
            if self.process.poll() is not None:
                self._reader.join(5)
                if not re.search(pattern, "".join(self.lines)):
                    raise AssertionError(f"the server has ended with {self.process.returncode}:\n{''.join(self.lines)}")
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{''.join(self.lines)}")

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def post(self, path: str, body: Any = None, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields if body is None else body)

    def complete(self, prompt: Any = "The roof", **fields: Any) -> dict[str, Any]:
        """Returns the answer to a completion, which must succeed."""
        answer = self.post("/v1/completions", prompt=prompt, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """Returns the events of a stream, the last of which must be [DONE]."""
        with self.client.stream("POST", path, json={"stream": True} | fields) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            *found, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert last == "[DONE]"
        return [json.loads(each) for each in found]

    def metric(self, name: str, **labels: str) -> float:
        """Returns a series' value."""
        said = ",".join(f'{key}="{value}"' for key, value in sorted((labels | {"model_name": self.name}).items()))
        text = self.client.get("/metrics").text
        found = re.search(rf"^rooftile:{name}{re.escape('{' + said + '}')} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in:\n{text}"
        return float(found[1])

    def wait_until_idle(self) -> None:
        """Waits until nothing runs or waits and all blocks are back; fails if that takes too long."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            busy = [self.metric(name) for name in ("num_requests_running", "num_requests_waiting", "queued_prompt_tokens")]
            if not any(busy) and self.metric("kv_blocks", state="used") == 0:
                return
            time.sleep(0.05)
        raise AssertionError(f"the server is not idle: {busy}")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Returns the exit code."""
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Ends the server and its engine."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        if hasattr(self, "client"):
            self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)
        _, left = psutil.wait_procs(children, 5)
        for child in left:
            child.kill()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        assert not left, "the engine has outlived its server"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
