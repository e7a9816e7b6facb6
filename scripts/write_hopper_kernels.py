"""Writes docs/reference/hopper-kernels.md: what each Hopper configuration compiles to, read from its machine code."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/hopper-kernels.md"

HEAD = """# What the Hopper kernels compile to

Each row is a configuration of the forward or, from `bwd-` on, of a backward kernel, compiled for sm90 with Triton 3.6 and
read from its machine code. Nothing here needs a GPU, and a test holds every row to the page, so a change of a kernel shows
what it did to the code.

- *kernel*: head dim and problem; `-3` and `-short` are other tiles, `-gathered` that of what was copied out of pages. `bwd-`
  alone adds dq up in memory, `bwd-ordered-` leaves it to `bwd-q-`, and `bwd-kv-` is the twins' of wide heads. `decode-` reads
  pages for a query a sequence; `decode-fp8-`, FP8.
- *registers*: a thread's share at the start; the warp roles then trade them (`setmaxnreg`), and a warpgroup that computes
  gets 240, 208 in the backward at D = 64, or 160 where there are three.
- *stack*: bytes kept outside registers. The forward's loops over blocks touch none of them, the backward's a word or two under
  a mask, and more with every option at once.
- *shared*: bytes of shared memory; a Hopper multiprocessor gives a program at most 232,448.
- *instructions a block*: the forward's loop over blocks that no mask cuts, 64 queries a warpgroup; the loop of the backward's
  longest role, with the branch that masks.
- *HGMMA*: matrix instructions in the whole kernel.

Written by `make tables`.

"""


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.kernels.hopper_machine_code import table

    PAGE.write_text(HEAD + table() + "\n")


if __name__ == "__main__":
    main()
