"""The caches of an engine.

layout    what a block, a row and a running sequence hold, for all layers together
memory    how many blocks fit into memory
"""
