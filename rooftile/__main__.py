"""`python -m rooftile` is the `rooftile` command."""

from rooftile.cli import main

if __name__ == "__main__":
    main()
