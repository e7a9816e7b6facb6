"""The log: one line per request on stderr, as text or as JSON. It never has a prompt, unless --log-prompts asks for it."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

log = logging.getLogger("rooftile.server")
# lines that wait for whoever reads the log, and seconds for the last ones
WAITING_LINES = 1000
FLUSH_S = 1.0


@dataclass(slots=True)
class AccessRecord:
    """One request for the log and the metrics, filled while it is answered."""

    id: str = ""
    method: str = ""
    path: str = ""
    status: int = 0
    key: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    paged_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    seconds: float = 0.0
    end: str = ""
    """How the answers ended: stop, length, the code of an error, or "gone" if the client has left."""
    prompt: str | None = None

    def line(self) -> dict[str, Any]:
        """Returns what the log says."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        shown = {name: value for name, value in found.items() if value not in ("", None)}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in shown.items()}


class _Quiet(logging.StreamHandler[Any]):
    """Writes to stderr; a full disk or a closed pipe loses lines, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drops the line."""


class _Queued(logging.Handler):
    """Lets a thread write, so that an unread log holds up no event loop; lines beyond the limit are lost.

    Args:
        writer: the handler that writes.
    """

    def __init__(self, writer: logging.Handler) -> None:
        super().__init__()
        self._writer = writer
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(WAITING_LINES)
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leaves a record to the thread."""
        with suppress(queue.Full):
            self._records.put_nowait(record)

    def flush(self) -> None:
        """Waits until all is written, for a second at most."""
        until = time.monotonic() + FLUSH_S
        while self._records.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def _write(self) -> None:
        while True:
            self._writer.handle(self._records.get())
            self._records.task_done()


class _LineFormatter(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Returns a record as one line: a client's words cannot begin another."""
        said: dict[str, Any] = getattr(record, "said", {})
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        if self._as_json:
            return json.dumps({"time": at, "level": record.levelname.lower(), "message": message} | said)
        words = "".join(f" {name}={json.dumps(value)}" for name, value in said.items())
        shown = message if record.exc_info else message.replace("\n", " ")
        return f"{at} {record.levelname.lower()} {shown}{words}"


def start_log(*, as_json: bool, queued: bool) -> None:
    """Sends the log of this process, and Python's warnings, to stderr.

    Args:
        as_json: whether each line is a JSON object.
        queued: whether a thread writes it; not in a process that ends by `os._exit`.
    """
    writer = _Quiet(sys.stderr)
    writer.setFormatter(_LineFormatter(as_json=as_json))
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.INFO, handlers=[_Queued(writer) if queued else writer], force=True)
    logging.captureWarnings(True)
    # mistakes of clients are not logged: anybody could fill the log with them
    for name in ("uvicorn.error", "uvicorn.access", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def log_request(access: AccessRecord) -> None:
    """Writes the line of a request."""
    log.info("request", extra={"said": access.line()})
