"""Reads the tensors of checkpoints into decoders, in 16 or 32 bits, or quantised by this library or by others.

    folder -> names of tensors (places) -> plain tensors (weights) | quantised tensors (quantised) -> parameters and projections

weights    plain tensors into a decoder's parameters
places     the parameters' names in a checkpoint
quantised  quantised tensors into a decoder's projections
write      a quantised checkpoint, in the layouts of compressed-tensors

Layouts, formats and checks of files are in `rooftile.weights.files`.
"""
