"""Models that another library has quantised: their weights are codes already, and nothing here knows them."""

from __future__ import annotations

from torch import nn

from rooftile.errors import InvalidInput
from rooftile.nn.converted import Converted

# the packages whose layers and weights are quantised
_PACKAGES = ("torchao", "bitsandbytes", "compressed_tensors", "auto_gptq", "gptqmodel", "awq", "optimum", "hqq", "modelopt")


def check_not_quantised(model: nn.Module) -> None:
    """Checks that no layer of a model is quantised already.

    Raises:
        InvalidInput: another library has quantised one, or all linear layers are converted.
    """
    converted = None
    for name, module in model.named_modules():
        if isinstance(module, Converted):
            converted = converted or name or "the model"
        where, own = name or "the model", type(module)
        package = own.__module__.partition(".")[0]
        if package in _PACKAGES:
            raise InvalidInput(f"{where} is a {own.__name__} of {package}, which has quantised the model; {_DUE}")
        if not isinstance(module, nn.Linear) or isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue
        if not hasattr(module, "weight"):
            raise InvalidInput(f"{where} is a linear layer without a weight, so it is quantised already; {_DUE}")
        kind = type(module.weight)
        package = kind.__module__.partition(".")[0]
        if package in _PACKAGES:
            raise InvalidInput(f"{where}.weight is a {kind.__name__} of {package}, so it is quantised already; {_DUE}")
    if converted is not None and not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise InvalidInput(f"{converted} is converted already; call rooftile.qat.dequantise(model) first")


_DUE = "give the model as it was before"
