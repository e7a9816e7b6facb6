"""The definitions of the approximate methods: plain PyTorch that follows each paper's formula, also in fp64."""
