"""The functions of the flash-attn package (version 2), under their names and in their argument order.

    from rooftile.integrations.flash_attn import flash_attn_func    # was: from flash_attn import flash_attn_func

The same: layouts, defaults, groups, causal aligned bottom-right, -1 for no bound in window_size, 0.0 for no softcap,
zeros for a row that sees no key, and gradients for q, k and v.

Different:

- every device and dtype that Rooftile supports, including fp32 and the CPU, and any head dim;
- dropout draws from Rooftile's generator, seeded from PyTorch's, so it drops other weights than flash-attn;
- return_attn_probs=True returns (out, softmax_lse, None): the weights are never stored. Gradients flow through softmax_lse
  too. With dropout and dense inputs the third result has the weights before dropout, with a negative sign where dropout took one
  away, as flash-attn's tests read it: a matrix of T x S, for debugging;
- deterministic=True holds, and False follows torch.use_deterministic_algorithms;
- max_seqlen and num_splits are ignored;
- paged KV caches have blocks of any power of two, and a backward through them raises Unsupported.

`install()` lets other libraries' `import flash_attn` find these functions. Version 4 has another order of arguments:
`rooftile.integrations.flash_attn_4`.
"""

from rooftile.integrations.flash_attn.dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from rooftile.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from rooftile.integrations.flash_attn.package import install as install
from rooftile.integrations.flash_attn.package import uninstall as uninstall
from rooftile.integrations.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
