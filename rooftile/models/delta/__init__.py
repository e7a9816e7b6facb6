"""Layers with a gated delta net in a decoder, beside attention.

families     config.json of Qwen3-Next, Qwen3.5 (text) and OLMo Hybrid
sizes        what `ModelConfig` knows of them
delta_layer  the layer
files        the names of its parts in a checkpoint
"""
