"""Shows a running server to its operator.

log        one line per request, as text or JSON
metrics    Prometheus's series
"""
