"""Writes docs/reference/hopper-kernels.md: properties of each compiled Hopper configuration, read from its machine code."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/hopper-kernels.md"

HEAD = """# Compiled Hopper kernels

Each row is a configuration of the forward or, from `bwd-` on, of a backward kernel, compiled for sm90 with Triton 3.6. The
numbers are read from its machine code, so no GPU is needed. A test compares every row with this page, so a review shows how a
change of a kernel affects the code.

- *kernel*: head dim and problem. `-3` and `-short` are other tiles; `-gathered` is the tile for pages that were gathered. `bwd-`
  adds dq up in memory; `bwd-ordered-` leaves dq to `bwd-q-`; `bwd-kv-` is the kernel for D = 256, in which one warpgroup sums dk
  and one dv. `decode-` reads pages with one query per sequence, `decode-fp8-` FP8 pages. `blocks-` follows lists of blocks of
  that size, and in the cases `bits-` some blocks are seen in part. `-partial` stores outputs over a part of the keys, and
  `-fp32-grads` gradients, in fp32 for a caller that adds them up.
- *registers*: per thread at the start. The warp roles then trade them (`setmaxnreg`): a consumer warpgroup gets 240; 208 in the
  backward at D = 64; 160 with three consumer warpgroups; 224 where two programs share a multiprocessor (blocks of 64 queries).
- *stack*: bytes per thread outside registers. The forward's loops over blocks use none of them; the backward's use a word or two
  under a mask, and more with all options at once.
- *shared*: bytes of shared memory. A program on Hopper can use at most 232,448.
- *instructions per block*: of the forward's unmasked loop over blocks, with 64 queries per warpgroup; in the backward, of the
  longest role's loop, with the branch that masks.
- *HGMMA*: matrix instructions in the whole kernel.

Written by `make tables`.

"""


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.kernels.hopper_machine_code import table

    PAGE.write_text(HEAD + table() + "\n")


if __name__ == "__main__":
    main()
