"""Routing Transformer: queries attend to keys of the same cluster."""
