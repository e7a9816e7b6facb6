"""`ProcessLock`: a lock that refuses in a forked process instead of waiting there for ever."""

from __future__ import annotations

import os
from threading import RLock

from rooftile.errors import InvalidInput


class ProcessLock:
    """A re-entrant lock of the process that made it.

    A fork copies the lock as it is. If another thread held it at that moment, no thread of the child would ever release it.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._process = os.getpid()

    def check(self) -> None:
        """Raises InvalidInput in a forked process."""
        if os.getpid() != self._process:
            raise InvalidInput(
                f"the LLM was made in process {self._process}, and this is process {os.getpid()}, forked from it: make an LLM "
                "here, or start this process by spawn instead of fork"
            )

    def __enter__(self) -> None:
        self.check()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
