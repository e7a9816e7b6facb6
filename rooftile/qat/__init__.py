"""Quantisation-aware training: train a model with the rounded weights that will serve it.

    rt.qat.prepare(model, "int4", group=32)
    ...                                         # train as before, with any optimiser
    rt.qat.save(model, folder)                  # a compressed-tensors checkpoint, for rt.LLM(folder)

preparation       `prepare`, `restore`, `off`, `status`
layers            the layers that round
product           the forward and the gradients of one of them
steps             counts an optimiser's steps
quantised_linear  `convert`, and the layer that it leaves
quantised_model   `quantise_model`, which rounds without training
checkpoint        `save`
compressed        the layouts of compressed-tensors
"""

from rooftile.qat.checkpoint import save
from rooftile.qat.preparation import Status, off, prepare, restore, status
from rooftile.qat.quantised_linear import QuantisedLinear, convert
from rooftile.qat.quantised_model import quantise_model

__all__ = ["QuantisedLinear", "Status", "convert", "off", "prepare", "quantise_model", "restore", "save", "status"]
