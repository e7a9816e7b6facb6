"""Runs `python -m tests.mutations`."""

import sys

from tests.mutations import main

sys.exit(main(sys.argv[1:]))
