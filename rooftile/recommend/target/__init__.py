"""Target attention: candidates of each user against the user's history, whole or searched."""
