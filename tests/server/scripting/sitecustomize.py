"""Python imports this file at its start where its folder is on the path: in servers of tests.

It lets each process of the server write its counts of objects, and lets a script say what the model answers.
"""

import os
import sys

from tests.server.scripting.counting import COUNTS, count_at_a_signal
from tests.server.scripting.script import SCRIPT, follow_a_script

if COUNTS in os.environ:
    count_at_a_signal()
if SCRIPT in os.environ and "rooftile.server.engine.process" in sys.orig_argv:
    follow_a_script()
