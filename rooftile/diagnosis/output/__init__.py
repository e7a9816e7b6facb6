"""Shows a diagnosis: as rows, as text, as a page."""
