"""A tour of what bounds programs, on this machine: `rooftile diagnose --tour`.

exhibit      what is shown: a prediction from this machine's ceilings, cases, and a sentence
elementwise  rising repeats; cosines and a softmax, eager and fused
products     matrix products from tiny to huge; decoding with batch 1 and 64
calls        a loop of small operators; attention, standard and tiled
guide        all of them, in their order
"""
