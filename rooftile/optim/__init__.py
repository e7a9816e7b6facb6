"""`AdamW` in one pass over memory, with gradient clipping that never waits for the device, and bf16 weights that lose nothing.

Decay of what 2:4 masks leave out is added in the same pass.

    adamw.py          the optimiser: states, groups, state dicts
    definition.py     an update of one weight in plain operations, in PyTorch's order
    operator.py       the operator, and the choice between the definition and the kernel
    split.py          an fp32 number as a bf16 number and its rest in 16 bits
    adamw_kernels.py  one Triton kernel for many weights
"""

from rooftile.optim.adamw import AdamW

__all__ = ["AdamW"]
