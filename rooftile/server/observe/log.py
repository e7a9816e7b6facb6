"""The log: one line per request on stderr, as text or as JSON. It never has a prompt, unless --log-prompts asks for it."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger("rooftile.server")


@dataclass(slots=True)
class Account:
    """One request for the log and the metrics, filled while it is answered."""

    id: str = ""
    method: str = ""
    path: str = ""
    status: int = 0
    key: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    seconds: float = 0.0
    end: str = ""
    """How the answers ended: stop, length, the code of an error, or "gone" if the client has left."""
    prompt: str | None = None

    def line(self) -> dict[str, Any]:
        """Returns what the log says."""
        found = {name: value for name, value in asdict(self).items() if value not in ("", None)}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


class _Quiet(logging.StreamHandler[Any]):
    """Writes to stderr; a full disk or a closed pipe loses lines, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Drops the line."""


class _Lines(logging.Formatter):
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


def start_log(*, as_json: bool) -> None:
    """Sends the log of this process to stderr."""
    handler = _Quiet(sys.stderr)
    handler.setFormatter(_Lines(as_json=as_json))
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # what clients do wrong is no line of ours: anybody could fill the log with it
    for name in ("uvicorn.error", "uvicorn.access", "httpx"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def tell(account: Account) -> None:
    """Writes the line of a request."""
    log.info("request", extra={"said": account.line()})
