"""Linformer: keys and values projected to fewer rows."""
