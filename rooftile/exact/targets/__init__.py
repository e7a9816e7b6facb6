"""Attention under `Targets(n)`: ordinary calls over the history, and each target's pair with itself.

The last n queries of a sequence see the same interval of keys of the history, and each its own key. So rows of the history are a
call over the history's keys, and targets a call in which every row sees every key of that interval. A target's own pair is one
more part of its softmax, merged by log-sum-exp. Targets never meet in a tile: a NaN in one reaches no other, in no gradient.

    calls.py      the way of a call: checks, parts, and the merge
    dense.py      the two calls of a dense call
    packed.py     the two calls of packed sequences
    own_pair.py   a target's pair with itself
"""
