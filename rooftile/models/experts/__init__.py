"""Feed-forwards with experts in a decoder.

sizes         what `ModelConfig` knows of them
feed_forward  the router, the experts, and the network that all tokens share
"""
