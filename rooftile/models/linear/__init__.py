"""Layers of linear attention and of Performer in a decoder: attention whose sums over keys are a state of a fixed size.

sizes            what `ModelConfig` knows of them
performer_layer  attention with a projection that is drawn once
"""
