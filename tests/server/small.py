"""The keys of a server with little room, which the fixture `small` starts."""

from __future__ import annotations

from rooftile.server.keys import new_key

KEY, LINE = new_key("ann")
OTHER, OTHER_LINE = new_key("bob")
# it runs two answers, and lets three wait
ROOM = ("--max-num-seqs", "2", "--max-waiting", "3", "--max-waiting-tokens", "300")
