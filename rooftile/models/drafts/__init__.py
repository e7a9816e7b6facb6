"""Small heads that draft for a decoder, from its hidden states.

eagle3   the heads of EAGLE-3
files    reads one from its folder
"""
