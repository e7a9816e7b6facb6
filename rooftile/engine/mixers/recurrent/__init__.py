"""Layers with a convolution and a recurrence, whose memory is a state of a fixed size: Mamba-1 and Mamba-2."""
