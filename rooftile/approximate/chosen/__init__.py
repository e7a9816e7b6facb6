"""Exact softmax over keys that are chosen: by place, by a hash, by a centroid, or by approximate scores.

pairs                rows taken by index, and exact attention over small sets of pairs
sparse_transformer   strided and fixed sets, by place
reformer             chunks of tokens sorted by hash
routing              clusters around centroids
loki                 keys with the largest approximate scores, for decoding
native_sparse        compressed, selected and near keys, weighed by gates
compression          keys and values in blocks, for the last
selection            the choice of blocks, and attention to them
centroids            the training of routing's centroids
arrange              arrangements of queries that make sets of keys intervals
"""
