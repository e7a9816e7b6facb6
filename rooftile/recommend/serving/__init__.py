"""Serving users: histories that stay in pages, events that are appended, candidates that are scored."""
