"""Quantisation-aware training: train a model with the rounded or 2:4 weights that will serve it.

    rt.qat.prepare(model, "int4", group=32)
    ...                                         # train as before, with any optimiser
    rt.qat.save(model, folder)                  # a compressed-tensors checkpoint, for rt.LLM(folder)

preparation       `prepare`, `restore`, `off`
selection         finds the layers to prepare, and checks them
foreign           refuses models that another library has quantised
shared            refuses a weight that two layers do not round alike
status            `status`
coverage          says which share of the weights is covered
found             finds prepared layers
patterns          which layers a pattern of names means
layers            the layers that round
rounded           the parts that they share with weights of other modules
tensors           weights of modules that multiply themselves: fused experts, attention, Conv1D
numbers           the rounded numbers of a weight, with gradients
fast_paths        switches off PyTorch's kernels that call no layer
described         the state of a prepared layer, in words
product           the forward and the gradients of one of them
codes             the codes of a weight, and what they leave for its gradient
learned           scales that are learned
masking           masks of 2:4 weights: SR-STE
slow              warns where a device has no units for a format
finite            refuses weights that are not finite
steps             counts an optimiser's steps
state             `state_dict` and `load_state_dict`, for a resumed run
quantised_linear  `convert`, `dequantise`, and the layer that it leaves
quantised_model   `quantise_model`, which rounds without training
checkpoint        `save`
codes_saved       of a converted model
"""

from rooftile.nn.sparse_linear import SparseLinear
from rooftile.qat.checkpoint import save
from rooftile.qat.preparation import off, prepare, restore
from rooftile.qat.quantised_linear import QuantisedLinear, convert, dequantise
from rooftile.qat.quantised_model import quantise_model
from rooftile.qat.state import load_state_dict, state_dict
from rooftile.qat.status import Status, status

__all__ = [
    "QuantisedLinear", "SparseLinear", "Status", "convert", "dequantise", "load_state_dict", "off", "prepare", "quantise_model",
    "restore", "save", "state_dict", "status",
]  # fmt: skip
