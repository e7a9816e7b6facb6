"""The Triton kernels of `rooftile.fused` and their launches: each module is imported at the first call on a GPU that names it.

Nothing here waits for the device or depends on data in its shapes, so a CUDA graph can hold every launch. Tiles and warps follow
from the size of a row and never from the number of rows, so the bits of a row do not depend on the batch.
"""

from rooftile.runtime.late_names import late_names

__getattr__ = late_names("rooftile.fused.kernels", {})
