"""Python imports this file at its start where its folder is on the path: in a server of `tests/server/scripted.py`.

In the engine's process, and nowhere else, it lets a script say what the model answers.
"""

import sys

if "rooftile.server.engine.process" in sys.orig_argv:
    from tests.server.scripting.script import follow_a_script

    follow_a_script()
