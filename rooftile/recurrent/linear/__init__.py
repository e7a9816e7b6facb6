"""Attention as a recurrence over a state of fixed size: S <- a S + f(k) v^T, computed chunk by chunk.

features     the maps f and their gradients
problem      the options, and their code
by_chunks    forward and backward in plain operations
plain        the same of packed sequences, and of inputs with NaN
chunked      the operator, with its gradient, and the choice of a kernel
kernels      the same in Triton
"""
