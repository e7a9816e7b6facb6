"""One engine on several ranks: processes that hold a part of the model each (tensor parallelism).

group       RankGroup: what the ranks exchange
opening     makes the group: of processes that are started here, or of those that torchrun has started
processes   starts the other ranks on this machine, and watches them
leader      Leader: what rank 0 does for the others: orders, failures, the end
worker      the process of another rank
following   what another rank does: it runs rank 0's orders
"""
