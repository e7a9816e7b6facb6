"""Watches the steps of a program while they run.

steps       begins and ends steps
watch       the operators of one step, with their counts, modules and lines
dispatched  the mode that sees every operator
modules     the module that runs
modes       PyTorch's modes around a call: gradients, inference, autocast
compiled    the kernels that torch.compile has generated
timeline    one profiled step: times in context, and gaps
intervals   of time
host_place  what the host does in the gaps
idle        the gaps as parts of a step
where       the line of the user's code
"""
