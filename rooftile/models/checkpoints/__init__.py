"""Reads the tensors of checkpoints, in 16 or 32 bits, or quantised by this library or by others.

weights    plain tensors into a decoder's parameters
places     the parameters' names in a checkpoint
folder     what is a checkpoint's folder, and what is none
methods    the ways of quantising that are read, and what to do with the others
plan       the argument `weights=`: what is quantised, to which format
formats    the words for formats, and weights in them
quantised  quantised tensors into a decoder's projections
layouts    one file per family of layouts: tensors and configuration into `QuantisedWeight`s
tensors    checks and conversions that they share
write      a quantised checkpoint, in the layouts of compressed-tensors
"""
