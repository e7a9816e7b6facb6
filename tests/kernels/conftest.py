"""Compiles kernels as `rooftile.runtime.launch` does: with fused multiply-adds where a kernel does not say otherwise."""

import os

# what tests compile themselves has no launch that says it, and Triton 3.9 warns of that
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# no test reads line numbers, and a compilation takes longer with them
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
