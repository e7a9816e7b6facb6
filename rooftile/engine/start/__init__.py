"""The start of an engine, from a model's name to the first step.

checkpoint    finds the folder of a model's name, and its authors' sampling parameters
blueprint     what is known and refused before weights are read
draft_plan    what drafts for a model, known and refused at the same time; drafts has its runner
loading       loads weights while kernels compile
build         builds an engine from a checkpoint folder
compilation   compiles kernels in threads while weights load
warm_up       the jobs that compile them
replica       the GPUs or cores of one of several engines on a machine
"""
