"""Reformer: queries attend to keys of the same hash."""
