"""From standard attention to the Hopper kernel, one technique at a time."""
