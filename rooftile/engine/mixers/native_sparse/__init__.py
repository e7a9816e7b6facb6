"""Native Sparse Attention: its caches, its steps and its kernels."""
