"""Encoders: each token sees those before and after it. They give hidden states, of which embeddings and scores are made.

sizes        what an encoder has beside a decoder's sizes
families     config.json of BERT, RoBERTa, XLM-R and ModernBERT
encoder      `Encoder`
score_head   the head of a cross-encoder
files        the names of their tensors in a checkpoint
"""
