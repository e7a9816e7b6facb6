"""How checkpoints store quantised and 2:4 weights.

settings             config.json, read and checked
methods              the quantization methods of checkpoints, and which are refused
plan                 which module of a checkpoint has which format
layouts              the layouts that are read
tensors              the tensors of a module by the last parts of their names
formats              the words of `LLM(weights=...)`
folder               checks of a checkpoint's folder
compressed_tensors   the layouts that are written
two_four             our own layout of 2:4 weights
"""
