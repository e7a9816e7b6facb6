"""`python -m rooftile_lab` is the `rooftile` command with the lab's commands, also in a checkout that is not installed."""

from importlib.metadata import entry_points

from rooftile.cli import main
from rooftile.cli.app import app
from rooftile_lab.cli import add

if __name__ == "__main__":
    if not entry_points(group="rooftile.commands", name="lab"):
        add(app)
    main()
