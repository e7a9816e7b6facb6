"""Native Sparse Attention: compressed blocks, the best blocks whole, and a window, summed by gates.

attention    the sum of the three branches
compression  one key and value for each block
selection    which blocks each query sees, and attention to them
selected     attention to selected blocks: kernels and plain operations
decoding     one query per sequence on a paged cache
definition   the method in plain operations
"""
