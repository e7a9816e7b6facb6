"""Measures a server in a process of its own beside its engine alone, for `rooftile bench server`.

checkpoint    a model with random weights, and its tokenizer
process       the server's process
client        requests that take little time of the client
run           the options, the engine and the server of one run
bars, lag     the costs of HTTP
on_ray        a server on a Ray cluster beside one without
overload      twice as many requests as the server can answer
"""
