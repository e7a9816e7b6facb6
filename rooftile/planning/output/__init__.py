"""How a plan is shown: as a table and as a page."""
