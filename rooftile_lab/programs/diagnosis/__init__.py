"""Diagnoses of programs that nobody has tuned for `rooftile diagnose`."""
