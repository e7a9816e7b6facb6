"""The server: an engine behind OpenAI's API. Its process answers HTTP, and the engine runs in another one.

    this process    socket -> http: protocol, middleware, app, body, forms -> texts (tokens) -> admission -> engine.remote
    the other       engine.process: loop -> Engine.step -> following (the news of a step)
    this process    engine.remote -> engine.calls -> http: responder, texts -> sse or one object -> socket

settings    the settings of `rooftile serve`
server_run  starts and ends a server
service     the served model, shared by all routes
limits      the limits in one place
admission   how much may wait
keys        who may come in
refusals    errors in OpenAI's form
routing     which engine answers a prompt
engine/     the engine's process
replicas/   several engines behind one API
on_ray/     the same on a Ray cluster
http/       from a socket to a request
observe/    log and metrics
page/       the page at /
"""
