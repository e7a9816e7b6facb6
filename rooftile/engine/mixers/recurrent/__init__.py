"""Layers with a convolution and a recurrence, whose memory is a state of a fixed size: Mamba-1, Mamba-2 and gated delta nets."""
