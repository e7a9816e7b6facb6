"""Smaller calls: an operator on a part of its data, as E5 and E6 need it.

axes    the dimensions along which a call can be cut
rules   the axes of operators for which they cannot be found by trying
lists   operators on lists of tensors, as optimisers call them
fixed   E6: the time at size zero
"""
