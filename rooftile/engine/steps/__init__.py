"""The steps of an engine: which tokens the model reads, and how a device computes them.

scheduler         which requests the model reads in the next step (continuous batching)
state_plan        which states a step begins with, and which it leaves behind
step              Step: a step in integers, and the buffer that carries it to other ranks
step_maker        makes it of a plan
step_inputs       the tokens of a step, in tensors
runner            runs a step on a device
graphs            CUDA graphs of steps that only decode
batch_invariant   how a step is computed if an answer's bits may not depend on its neighbours
"""
