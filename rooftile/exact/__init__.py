"""Exact attention: the functions of `rooftile`, and the way from a call to a kernel.

    api -> normalise -> validate -> Spec -> dispatch -> ops -> a backend's kernel

api          `attention` and its relatives
normalise    padding, nested tensors and lists of blocks become dense or packed calls
validate     what a call may hold; makes a Spec
spec         a problem without its lengths
masks        masks as intervals of keys
blocks       lists of blocks, beside masks
ops          operators of torch.library with their gradients; padding, nested tensors, paged caches
dispatch     the backend for a Spec
backends     hopper, triton, sdpa, tiled, eager
reference    the definitions, in plain operations
paged_route  how many queries the sequences of a paged call have
cases        problems by name, for benchmarks and tests
"""
