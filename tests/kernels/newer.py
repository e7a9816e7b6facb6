"""Says whether kernels are compiled by a newer Triton than the one that their tiles were chosen with.

Tiles fill the registers under Triton 3.6. Triton 3.9 keeps a few words outside of registers in the fullest kernels, such as a
thread's number, for which it asks where a slot of a ring is given back. The bounds of these kernels have room for the words, and
`docs/how-to/install.md` says that their speed is not measured there.
"""

import triton

NEWER = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
