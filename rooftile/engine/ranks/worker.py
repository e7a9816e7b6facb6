"""The process of a rank that rank 0 has started: `python -m rooftile.engine.ranks.worker FD ORDERS`.

The socket FD is one end of a pair, over which rank 0 says what to build. When the other end closes, this process ends at once.
The socket ORDERS brings rank 0's orders.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
import time
from multiprocessing.connection import Connection

from rooftile.engine.ranks.failures import timed_out
from rooftile.engine.ranks.lines import Line
from rooftile.errors import InvalidInput, Unsupported

# seconds in which rank 0 ends this process, if something else than this process has gone wrong; more where it has waited, too
_ELSEWHERE_S, _LATER_S = 1.0, 8.0


def main() -> None:
    """Builds this rank's part, and runs rank 0's orders until it ends."""
    connection = Connection(int(sys.argv[1]))
    given = connection.recv_bytes()
    line = Line(connection, lambda said_goodbye: os._exit(0))
    try:
        # here and not above: it takes seconds, in which this process already looks whether rank 0 is there
        from rooftile.engine.ranks.opening import work

        rank, ranks, meeting, (model, config) = pickle.loads(given)
        work(model, config, rank, ranks, meeting, socket.socket(fileno=int(sys.argv[2])), line)
    except (InvalidInput, Unsupported) as error:
        line.tell(error)
        os._exit(1)
    except Exception as error:
        # rank 0 ends this process if another rank has ended
        time.sleep(_LATER_S if timed_out(error) else _ELSEWHERE_S)
        logging.getLogger(__name__).exception("a rank has failed")
        line.tell(error)
        os._exit(1)
    # no destructor of a library that waits for others
    os._exit(0)


if __name__ == "__main__":
    main()
