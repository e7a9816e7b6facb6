"""The server in a process of its own beside the engine alone: what `rooftile bench server` measures."""
