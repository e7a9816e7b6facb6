"""A search in Triton: bounds from a first walk of the events, what passes them in a second walk, and a sort of the few that pass."""
