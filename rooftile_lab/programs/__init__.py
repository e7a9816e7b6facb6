"""Programs that are run by hand: `python -m rooftile_lab.programs.plans`."""
