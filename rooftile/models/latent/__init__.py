"""Layers with multi-head latent attention in a decoder.

families      config.json of DeepSeek-V2 and V3
sizes         what `ModelConfig` knows of them
latent_layer  the layer
files         the names of its parts in a checkpoint
"""
