"""Diagnoses of programs that are not tuned for `rooftile diagnose`."""
