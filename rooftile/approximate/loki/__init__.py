"""Loki: keys are chosen by scores of their leading principal components."""
