"""The `rooftile` command. One file a command; `app` puts them together."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 when done, 2 with one sentence on stderr for what the user can mend."""
    from rooftile.cli.app import app
    from rooftile.errors import InvalidInput, Unsupported

    try:
        app(args=arguments, prog_name="rooftile")
    except (InvalidInput, Unsupported) as error:
        print(f"rooftile: {error}", file=sys.stderr)
        sys.exit(2)
