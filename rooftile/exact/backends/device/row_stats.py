"""The numbers that a walk of the backward reads for each row of queries, two in each word of 64 bits.

    words         bits 63..32   lse, fp32, in the unit of the scores: log2 for bf16 and fp16, natural for fp32 and with a bias
                  bits 31..0    D_i = sum_c dO_ic O_ic - dL_i, fp32; dL is the gradient that comes in through lse: dS = P (dP - D) then carries it
    rests         bits 63..32   lse again
                  bits 31..0    what its rounding lost, in log2: P = exp(x - lse - rest)

A row is far if the rounding of its lse would show in its weights. Only far rows have a rest, which the walk over keys for dq
computes (see `triton.far_rows`), with a D of its own; until then -dL is in its place. The others have 0. Where scores are in log2, a far row's lse is NaN in `words`: whatever sums it gets
NaN, and computes such a tile once more with the lse and the rest of `rests`, so that the others pay nothing.

A row that sees nothing gets lse = +inf: exp(x - inf) is 0, so it weighs nothing. The words are int64, dense (B, H, padded T) and
packed (H, total_q). A dense head is padded to a multiple of ROWS_PADDED with rows that see nothing, which spares the walks their bounds.

The Triton backward writes and reads these words. The Hopper backward writes them too, for Triton's kernels to read where they repair
its gradients (see `rooftile.exact.backends.triton.flash_bwd_repair`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rooftile.numerics.softmax import LN2

# every tile of queries divides this
ROWS_PADDED = 128

# an lse within this is rounded by no more than scores of fp32 are, and than a weight in half precision is
FAR_OF_FP32, FAR_OF_HALF = 64.0, 8192.0


def pack(lse, delta):
    """Two fp32 numbers as one word. Triton and Gluon each compile this function for themselves."""
    low = delta.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = lse.to(tl.uint32, bitcast=True).to(tl.uint64)
    return ((high << 32) | low).to(tl.int64, bitcast=True)


def rest_of(rests: Tensor, lse: Tensor) -> Tensor:
    """Returns the part that the rounding of lse has lost, natural and in the shape of lse: the low halves of the words."""
    return rests.view(torch.float32)[..., : 2 * lse.shape[-1] : 2] * LN2


pack_lse_delta = triton.jit(pack)


@triton.jit
def unpack_lse_delta(word):
    """lse and delta."""
    word = word.to(tl.uint64, bitcast=True)
    lse = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return lse, word.to(tl.uint32).to(tl.float32, bitcast=True)
