"""Keeps pauses out of running answers: threads that give way to them, and fewer walks of Python's garbage collector."""

from __future__ import annotations

import gc
import os
import sys
import threading

# a tenth of an ordinary thread's share of a busy core. Not less: such a thread also holds Python's lock for moments
NICE = 10


def give_way() -> None:
    """Lowers the priority of the calling thread, and of the threads that it will start; only Linux has priorities per thread.

    For work that one client can make long, so that other clients' answers go on meanwhile.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def freeze_garbage() -> None:
    """Hides all that is alive from the garbage collector, which would walk through all modules for a tenth of a second at times.

    Called once, when a process has imported what it needs.
    """
    gc.collect()
    gc.freeze()
