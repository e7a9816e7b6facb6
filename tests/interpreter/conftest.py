"""The Triton kernels on the CPU, in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/interpreter.

The variable must be set before a kernel is imported, and then nothing else compiles in that process, so these tests run
in one of their own and are not collected in any other.
"""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    from dataclasses import replace

    from triton.runtime import interpreter

    from tests.interpreter.mend import mend
    from tests.interpreter.quick import be_quick

    mend()
    be_quick()
    # the numbers of these cases are too small to overflow, and a check of every sum of integers takes a quarter of the time
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
