"""The lab: what measures Rooftile and its peers, and draws the report. The package `rooftile` imports nothing of it."""
