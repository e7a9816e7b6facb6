"""Tells how a worker of pytest-xdist ended that crashed: its exit status or signal, and where each thread was.

pytest says which test ran. Without this, the traces of threads stand somewhere among the dots, and the signal nowhere.
"""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

FILE = "file of traces"
_TRACE = pytest.StashKey[Any]()
# its pipe is closed, so a worker has ended or is about to
PATIENCE_S = 10.0


class Workers:
    """In the process that runs no test: gives each worker a file for its traces, and reads the files of those that crash."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="traces-")
        self._crashes: list[str] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[FILE] = str(Path(self._folder.name, node.gateway.id))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error is None:
            return
        status = node.gateway._io.popen.wait(PATIENCE_S)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        trace = Path(node.workerinput[FILE])
        self._crashes.append(f"{node.gateway.id} ended with {how}\n{trace.read_text() if trace.exists() else ''}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for crash in self._crashes:
            terminalreporter.section("a worker crashed")
            terminalreporter.write_line(crash)


def configure(config: pytest.Config) -> None:
    """Begins to watch, in a worker or in the process that starts workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Workers(), "crashes of workers")
    elif FILE in config.workerinput:
        # open until the process ends
        config.stash[_TRACE] = open(config.workerinput[FILE], "w")  # noqa: SIM115
        faulthandler.enable(config.stash[_TRACE])
