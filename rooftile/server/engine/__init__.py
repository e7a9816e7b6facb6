"""The engine in a process of its own, and how the server speaks to it.

messages    what the two processes say to each other
wire        how a message is cut into bytes, and read again
process     the engine's process: `python -m rooftile.server.engine.process`
link        the engine's end: orders from the socket, turns of the engine's loop to it
following   what is new in an answer since it was last sent
calls       one request in the server's process, and what its client has not read yet
remote      starts the engine's process, sends orders, and hands out news
"""
