"""`rooftile serve` in a process of its own."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rooftile_lab.bench.processes import ROOT

PATIENCE_S = 900.0


class Server:
    """`rooftile serve` with a folder, in a process of its own.

    Args:
        folder: the checkpoint.
        options: words of the command.
        env: its environment.
    """

    def __init__(self, folder: Path, *options: str, env: Mapping[str, str]) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.log: list[str] = []
        began = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rooftile", "serve", str(folder), "--port", "0", *options],
            cwd=ROOT, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self.port = int(self._wait_for(r"listening on http://[^;]*:(\d+);"))
        self.listening_s = time.perf_counter() - began
        self._wait_for("(ready): ")
        self.ready_s = time.perf_counter() - began

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.put(line)
        self.lines.put("")

    def _wait_for(self, pattern: str) -> str:
        while line := self.lines.get(timeout=PATIENCE_S):
            self.log.append(line)
            if found := re.search(pattern, line):
                return found[1]
        raise RuntimeError(f"the server has ended:\n{''.join(self.log)}")

    @property
    def pids(self) -> list[int]:
        """The ids of the server's process and of the engine's."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *map(int, children.split())]

    @property
    def cpu_s(self) -> dict[str, float]:
        """Seconds that the cores have spent so far on the client, which is this process, on the API, and on the engine."""
        tick = os.sysconf("SC_CLK_TCK")
        spent = {}
        for name, pid in zip(("client", "api", "engine"), (os.getpid(), *self.pids), strict=True):
            # the command's name, in brackets, may hold spaces; user and system time come 12 fields after it
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            spent[name] = (int(fields[11]) + int(fields[12])) / tick
        return spent

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
