"""Remedies with a price: which change saves how much of a step."""
