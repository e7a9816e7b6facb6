"""PyTorch's fast paths: kernels that compute a whole encoder layer from the weights that they read, and call no layer inside.

They would leave out the rounding of activations, so they are switched off in modules that have a layer that rounds. In eager mode
PyTorch keeps away from them by itself where a weight is a `reading.ReadWeight`; compiled code reads plain numbers.
"""

from __future__ import annotations

from torch import nn

# the attribute that says whether a module may take its fast path
_SWITCHES: dict[type[nn.Module], str] = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}
_BEFORE = "_rooftile_fast_path"


def close(model: nn.Module, kind: type[nn.Module]) -> None:
    """Switches off the fast paths of modules that contain one of a kind."""
    for module in model.modules():
        for owner, switch in _SWITCHES.items():
            if not isinstance(module, owner) or _BEFORE in vars(module) or switch not in vars(module):
                continue
            if any(isinstance(inner, kind) for inner in module.modules()):
                vars(module)[_BEFORE] = vars(module)[switch]
                vars(module)[switch] = 0


def reopen(model: nn.Module) -> None:
    """Undoes `close`."""
    for module in model.modules():
        for owner, switch in _SWITCHES.items():
            if isinstance(module, owner) and _BEFORE in vars(module):
                vars(module)[switch] = vars(module).pop(_BEFORE)
