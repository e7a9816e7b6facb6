"""Loki in the steps that decode; `calibration` fits it to the keys of a model."""
