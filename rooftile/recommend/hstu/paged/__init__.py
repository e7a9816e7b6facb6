"""HSTU attention of a few rows to users' histories in pages: events that were appended, or candidates."""
