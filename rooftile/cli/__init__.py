"""The `rooftile` command. One file per command; `app` combines them."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 on success, 2 with one sentence on stderr for a mistake of the user."""
    from rooftile.cli.app import app
    from rooftile.errors import InvalidInput, Unsupported

    try:
        app(args=arguments, prog_name="rooftile")
    except (InvalidInput, Unsupported) as error:
        print(f"rooftile: {error}", file=sys.stderr)
        sys.exit(2)
