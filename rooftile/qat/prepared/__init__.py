"""Layers with weights that round.

layers      nn.Linear and nn.Embedding
rounded     the parts that they share with weights of other modules
tensors     weights of modules that multiply themselves: fused experts, attention, Conv1D
found       finds prepared layers
described   the state of a prepared layer, in words
fast_paths  switches off PyTorch's kernels that call no layer
"""
