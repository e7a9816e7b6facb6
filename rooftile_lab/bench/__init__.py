"""Timing attention beside its peers: `run.measure` for one case, `rooftile bench attention` for many."""
