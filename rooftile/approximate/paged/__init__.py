"""How an engine decodes with the methods that choose keys: one query per sequence, keys in the blocks of a paged cache.

loki            chooses whole pages, and runs the exact kernel for paged decoding on the shorter table
native_sparse   compressed, selected and near keys, from the cache
kernels         the scores of pages in a Triton kernel
pieces          bounds the memory of a step
"""
