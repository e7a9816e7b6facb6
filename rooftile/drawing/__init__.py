"""Draws pages: charts as SVG, and HTML files that work offline, on a phone and in dark mode."""
