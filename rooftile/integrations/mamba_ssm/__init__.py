"""The names of mamba-ssm and causal-conv1d, with their arguments and layouts.

from rooftile.integrations.mamba_ssm import Mamba2, selective_scan_fn    # was: from mamba_ssm import ...

mamba-ssm's scan and causal-conv1d have channels before tokens, (B, D, L); Mamba-2's functions have (B, L, H, P). Nothing is
compiled at installation. `selective_scan_fn` has gradients through its last state, which mamba-ssm's has not.

functions    the scans, steps and convolutions
layers       `Mamba` and `Mamba2`
"""

from rooftile.integrations.mamba_ssm.functions import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba_chunk_scan_combined,
    selective_scan_fn,
    selective_state_update,
)
from rooftile.integrations.mamba_ssm.layers import Mamba, Mamba2

__all__ = [
    "Mamba",
    "Mamba2",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba_chunk_scan_combined",
    "selective_scan_fn",
    "selective_state_update",
]
