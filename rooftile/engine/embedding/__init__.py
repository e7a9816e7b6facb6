"""Vectors of texts, and scores of pairs of texts, by encoders and by decoders without a cache.

folder     `Recipe`: what a folder of sentence-transformers says about pooling, prompts and lengths
reading    texts and pairs of texts to tokens
pooling    hidden states of packed texts to vectors
steps      what follows pooling: projections and norms of vectors
packed     a decoder that reads packed texts without a cache
embedder   `Embedder`: batches of texts through a model
output     what a caller gets
"""
