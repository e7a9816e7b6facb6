"""What an operator sees of a running server.

    log        one line per request, as text or JSON
    metrics    Prometheus's series
"""
