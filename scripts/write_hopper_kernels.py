"""Writes docs/reference/hopper-kernels.md: what each Hopper configuration compiles to, read from its machine code."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/hopper-kernels.md"

HEAD = """# What the Hopper kernels compile to

Each row is a configuration of the forward, compiled for sm90 with Triton 3.6 and read from its machine code. Nothing here needs a
GPU, and a test holds every row to the page, so a change of a kernel shows what it did to the code.

- *registers*: a thread's share at the start; the warp roles then trade them (`setmaxnreg`), and a warpgroup that computes
  gets 240, or 160 where there are three.
- *stack*: bytes kept outside registers, none of them inside a loop over blocks of keys.
- *shared*: bytes of shared memory; a Hopper multiprocessor gives a program at most 232,448.
- *instructions a clear block*: the loop over blocks that no mask cuts, 64 queries a warpgroup.
- *HGMMA*: matrix instructions in the whole kernel.

Written by `make tables`.

"""


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.unit.hopper_machine_code import table

    PAGE.write_text(HEAD + table() + "\n")


if __name__ == "__main__":
    main()
