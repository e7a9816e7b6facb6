"""Checkpoints of prepared and of converted models.

checkpoint   `save`
codes_saved  the tensors of a converted model
"""
