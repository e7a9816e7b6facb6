"""The pictures of a diagnosis, drawn from its record alone."""
