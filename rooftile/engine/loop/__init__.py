"""Runs an engine for clients elsewhere: in another process, or in the event loops of this program.

    clients --> link: orders --> Loop: engine.add, abort, step --> Turn: taken, refused, started, news --> link --> clients

loop        Loop: takes orders and runs steps
callers     the link to callers in this program (`AsyncEngine`); the link to another process is `rooftile.server.engine.link`
growth      outputs that hold only what is new
compiling   grammars of structured output, in threads
pauses      lower priority for work that one client can make long
"""
