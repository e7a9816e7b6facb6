"""Layers whose memory is a state of a fixed size.

state_mixer  what all of them refuse
mixer        a convolution and a recurrence: `mamba`, `mamba2`, `delta`
step         ... in one step
linear       linear attention and Performer
trials       runs of their kernels before the first request
"""
