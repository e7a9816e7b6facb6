"""Layers of Mamba-1 and Mamba-2 in a decoder, beside attention or alone.

families      config.json of Mamba, Falcon-Mamba, Mamba-2, Bamba, Jamba and Granite 4
sizes         what `ModelConfig` knows of them
mamba_layer   Mamba-1; `mamba2_layer` has Mamba-2
"""
