"""Layers with a recurrence, under the names and shapes of parameters that checkpoints have.

mamba            Mamba-1
mamba2           Mamba-2
gated_delta_net  the gated delta net
parts            their state, the gated norm, first values
"""
