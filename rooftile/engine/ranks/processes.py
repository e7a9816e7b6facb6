"""`WorkerProcesses`: the other ranks on this machine, which rank 0 starts and watches.

A line joins each to this process, and each side sees the end of the other. Nothing of this process is inherited but its
environment: no fork, and no second run of a program.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from rooftile.engine.ranks.failures import RankEnded
from rooftile.engine.ranks.lines import Lines, Told

# seconds that a worker may take to end by itself
_PATIENCE_S = 3.0


class WorkerProcesses:
    """The processes of ranks 1 to N - 1.

    Args:
        ranks: N.
        work: what each builds; it must be possible to pickle it.
        ended: called once, in a thread, with the reason, when a worker ends before `close`.
    """

    def __init__(self, ranks: int, work: object, ended: Callable[[Exception], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rooftile-"))
        self.meeting = self._folder / "ranks"
        """A file in a private folder, at which the ranks meet."""
        self._ended = ended
        self._closing = False
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[Connection] = []
        self.orders: list[socket.socket] = []
        """A socket to each worker, for orders."""
        try:
            for rank in range(1, ranks):
                self._start(rank)
            for rank, connection in enumerate(self._sockets, 1):
                connection.send((rank, ranks, str(self.meeting), work))
        except BaseException:
            self.close()
            self.remove_meeting()
            raise
        self.lines = Lines(self._sockets, self._note_end)

    def close(self, *, patient: bool = False) -> None:
        """Ends all workers; none is left when it returns.

        Args:
            patient: whether workers that were told to end get a moment to do so.
        """
        self._closing = True
        until = time.monotonic() + (_PATIENCE_S if patient else 0.0)
        while time.monotonic() < until and any(process.poll() is None for process in self._processes):
            time.sleep(0.005)
        with self._lock:
            for process in self._processes:
                if process.poll() is None:
                    process.kill()
            for process in self._processes:
                process.wait()
            for connection in self._sockets:
                connection.close()
            for orders in self.orders:
                orders.close()

    def remove_meeting(self) -> None:
        """Removes the file at which the ranks meet: a thread of NCCL's that looks into it would wait for it to come back."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        sends, receives = socket.socketpair()
        inherited = theirs.fileno(), receives.fileno()
        # a session of its own: Ctrl-C on a terminal reaches rank 0 only
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rooftile.engine.ranks.worker", *map(str, inherited)],
            stdin=subprocess.DEVNULL, pass_fds=inherited, start_new_session=True, env=_environment(),
        )  # fmt: skip
        theirs.close()
        receives.close()
        self._processes.append(process)
        self._sockets.append(Connection(ours.detach()))
        self.orders.append(sends)

    def _note_end(self, rank: int, told: Told | None) -> None:
        """Says why a worker has ended."""
        if self._closing:
            return
        process = self._processes[rank - 1]
        with self._lock:
            try:
                code = process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        ranks = len(self._processes) + 1
        if told is not None:
            self._ended(told.error(rank, ranks))
        else:
            how = f"signal {-code}" if code < 0 else f"code {code}"
            self._ended(RankEnded(f"rank {rank} of {ranks} has ended ({how})"))


def _environment() -> dict[str, str]:
    """Returns the workers' environment: they find this package where this process has it."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
