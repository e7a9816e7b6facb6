"""Layers that draft for a decoder, from its hidden states.

head          what they have in common
eagle3        the heads of EAGLE-3
eagle3_files  reads one from its folder
mtp           the layer of multi-token prediction that a checkpoint has behind its last layer
mtp_files     reads it from the decoder's checkpoint
"""
