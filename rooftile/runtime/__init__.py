"""The ground of every kernel: devices, launches, operators, words.

devices            what a device runs: its architecture, and whether Triton, Gluon and FP8 are there
launch             launches of Triton kernels, prepared once and repeated
dependent_launch   kernels that begin before the kernel in front of them has ended
early_weights      when a product may read its weight before the kernel in front of it has ended
hopper             Gluon's dialect for Hopper: descriptors, barriers, PTX
operators          operators of torch.library, their autograd and autocast
explanation        which backend runs a call, and why the others do not
words              names of arguments, and the words of other libraries
arguments          checks of flags, words and numbers
tensors            the dtype of autocast, and offsets of packed sequences
late_names         names that are imported when they are first used
dtypes             dtypes by their names
"""
