"""Quantisation-aware training: train a model with the rounded or 2:4 weights that will serve it.

    rt.qat.prepare(model, "int4", group=32)
    ...                                         # train as before, with any optimiser
    rt.qat.save(model, folder)                  # a compressed-tensors checkpoint, for rt.LLM(folder)

preparation      `prepare`, `restore`, `off`
selection        finds the layers to prepare, and checks them
patterns         which layers a pattern of names means
foreign          refuses models that another library has quantised
shared           refuses a weight that two layers do not round alike
sharded          weights of which every rank has a part
coverage         says which share of the weights is covered
status           `status`
state            `state_dict` and `load_state_dict`, for a resumed run
convert          `convert`, `dequantise`; the layers that they leave are `rooftile.nn`'s
quantised_model  `quantise_model`, which rounds without training
prepared         the layers that round, and modules with weights that do
rounding         their arithmetic: the product, codes, learned scales, masks, and what a step of the optimiser changes
saving           `save`
"""

from rooftile.nn.quantised_linear import QuantisedLinear
from rooftile.nn.sparse_linear import SparseLinear
from rooftile.qat.convert import convert, dequantise
from rooftile.qat.preparation import off, prepare, restore
from rooftile.qat.quantised_model import quantise_model
from rooftile.qat.saving.checkpoint import save
from rooftile.qat.state import load_state_dict, state_dict
from rooftile.qat.status import Status, status

__all__ = [
    "QuantisedLinear", "SparseLinear", "Status", "convert", "dequantise", "load_state_dict", "off", "prepare", "quantise_model",
    "restore", "save", "state_dict", "status",
]  # fmt: skip
