"""The arithmetic of rounded and masked weights.

product   a layer's product with its rounded weight, with gradients
numbers   the rounded numbers of a weight, with gradients
codes     the codes of a weight, and what they leave for its gradient
learned   scales that are learned
masking   masks of 2:4 weights: SR-STE
steps     counts an optimiser's steps
finite    refuses weights that are not finite
slow      warns where a device has no units for a format
"""
