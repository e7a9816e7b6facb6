"""Code that kernels in Gluon for Hopper share: the kernels of attention and of products with quantised weights.

gluon      the names of Gluon that differ between Triton releases
pipeline   rings of buffers that warp roles hand to each other
ptx        all inline PTX
"""
