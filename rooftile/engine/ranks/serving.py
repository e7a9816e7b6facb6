"""`serve_rank_0`: what another rank of torchrun's does inside of `LLM(...)`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from rooftile.engine.ranks.lines import Line
from rooftile.engine.ranks.machines import line_to_first
from rooftile.engine.ranks.place import Place
from rooftile.errors import InvalidInput, Unsupported

# seconds in which this rank ends by itself after the end of rank 0, which may have broken a step
_END_S = 2.0


def serve_rank_0(given: Place, work: Callable[[Any, Line], None]) -> NoReturn:
    """Does this rank's part until rank 0 ends its LLM.

    Args:
        given: this process's place.
        work: builds this rank's part and runs rank 0's orders; called with the ranks' store and the line to rank 0.

    Raises:
        SystemExit: at the end, with 0, if rank 0 has closed its LLM. If rank 0 has ended otherwise, this process ends with 1.
    """
    farewell, over = Future[bool](), threading.Event()

    def gone(said_goodbye: bool) -> None:
        """Ends this process if it does not end by itself: it may wait for ever for a device that waits for rank 0."""
        farewell.set_result(said_goodbye)
        if not over.wait(_END_S):
            _leave(given, said_goodbye)

    store = given.meet()
    line = line_to_first(store, given, gone)
    try:
        work(store, line)
    except (InvalidInput, Unsupported) as error:
        line.tell(error)
        raise
    except Exception as error:
        # rank 0 breaks collectives when it ends
        try:
            said_goodbye = farewell.result(_END_S / 2)
        except TimeoutError:
            line.tell(error)
            raise error from None
        _leave(given, said_goodbye)
    finally:
        over.set()
    raise SystemExit(0)


def _leave(given: Place, said_goodbye: bool) -> NoReturn:
    """Ends this process without destructors of libraries, which may wait for others."""
    if not said_goodbye:
        sys.stderr.write(f"rank 0 of {given.ranks} has ended, so rank {given.rank} ends\n")
    os._exit(0 if said_goodbye else 1)
