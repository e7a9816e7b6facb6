"""Says where kernels run, and checks weights."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.runtime.devices import runs_kernels
from rooftile.runtime.launch import is_capturing

# a mask is chosen from a weight of these
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)
# ... and a weight of these is compressed: codes of INT8 come with the mask of the weight that was quantised to them
HELD = (*DTYPES, torch.int8)


def kernels_run_on(w: Tensor) -> bool:
    """Whether Triton's kernels take w; otherwise PyTorch's operations compute the same bits."""
    return w.element_size() < 8 and runs_kernels(w)


def check_weight(w: object, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raises InvalidInput if w is no weight (N, K) with whole groups of four."""
    if not isinstance(w, Tensor) or w.dtype not in dtypes or w.ndim != 2:
        what = f"{w.dtype} {tuple(w.shape)}" if isinstance(w, Tensor) else type(w).__name__
        *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidInput(f"weight is {what}; must be a tensor (N, K) of {', '.join(names)} or {last}")
    if w.shape[1] % 4:
        raise InvalidInput(f"weight is {tuple(w.shape)}; K must be a multiple of 4, since two of each four neighbours are kept")


def is_raised(flag: Tensor) -> bool:
    """Whether a kernel raised its flag. This waits for the device, so it is never asked while a CUDA graph is captured."""
    return not (flag.is_cuda and is_capturing()) and bool(flag.item())


def check_numbers(w: Tensor) -> None:
    """Raises InvalidInput for NaN, which has no size."""
    if w.is_cuda and is_capturing():
        return
    lost = (w.float() if w.element_size() == 1 else w).isnan()
    if lost.any():
        row, column = (int(n) for n in lost.nonzero()[0])
        raise InvalidInput(f"weight is NaN at row {row}, column {column}; NaN has no size to choose by: find where it comes from")


def check_flag(name: str, value: object) -> None:
    """Raises InvalidInput for a value that is neither True nor False; a word such as "no" would count as True."""
    # NumPy's booleans are equal to these
    if value not in (True, False):
        raise InvalidInput(f"{name} is {value!r}; must be True or False")
