"""Requests, from the queue to the caller.

request     a request and its answers while they are being computed
readers     calls of several threads that one engine answers together
per_prompt  arguments that are one for all prompts, or one for each
output      the outputs that a caller gets back
stats       how an engine stands after a step
progress    a progress bar
"""
