"""Requests, from the queue to the caller.

request    a request and its answers while they are being computed
output     the outputs that a caller gets back
stats      how an engine stands after a step
progress   a progress bar
"""
