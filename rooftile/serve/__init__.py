"""Serving language models from a paged cache."""
