"""The server: an engine behind OpenAI's API. Its process answers HTTP, and the engine runs in another one.

settings     what `rooftile serve` is told
run          starts and ends a server
service      the served model, shared by all routes
limits       the limits in one place
admission    how much may wait
keys         who may come in
refusals     errors in OpenAI's form
engine/      the engine's process
http/        from a socket to a request
observe/     log and metrics
page/        the page at /
"""
