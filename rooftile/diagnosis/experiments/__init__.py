"""Experiments on one operator: they change its arithmetic, its bytes or its size, and watch the time."""
