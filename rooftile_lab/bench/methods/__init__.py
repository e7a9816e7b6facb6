"""The approximate methods as they are measured: beside exact attention in time, and in what they lose.

way            what all have in common
ways           the classics with their settings
native_sparse  Native Sparse Attention and its branches
table          the ways by name
peers          other libraries that compute the same
check          errors against the definition, before anything is timed
crossover      the length from which a method is faster
losses         what a method loses on Gaussian tensors, on a needle, and on a user's own
"""
