"""The two numbers that a walk of the backward reads for each row of queries, in one word of 64 bits.

    bits 63..32   lse, fp32, in the unit of the scores: log2 for bf16 and fp16, natural for fp32
    bits 31..0    D_i = sum_c dO_ic O_ic - dL_i, fp32; dL is the gradient that comes in through lse: dS = P (dP - D) then carries it

A row that sees nothing gets lse = +inf: exp(x - inf) is 0, so it weighs nothing. The words are int64, dense (B, H, padded T) and
packed (H, total_q). A dense head is padded to a multiple of ROWS_PADDED with rows that see nothing, which spares the walks their bounds.

The Triton backward writes and reads these words. The Hopper backward writes them too, for Triton's kernels to read where they repair
its gradients (see `rooftile.backends.triton.flash_bwd_repair`).
"""

import triton
import triton.language as tl

# every tile of queries divides this
ROWS_PADDED = 128


def pack(lse, delta):
    """Two fp32 numbers as one word. Triton and Gluon each compile this function for themselves."""
    low = delta.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = lse.to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((high << 32) | low).to(tl.int64, bitcast=True)


pack_lse_delta = triton.jit(pack)


@triton.jit
def unpack_lse_delta(word):
    """lse and delta."""
    word = word.to(tl.uint64, bitcast=True)
    lse = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return lse, word.to(tl.uint32).to(tl.float32, bitcast=True)
