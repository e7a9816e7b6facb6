"""The report: experiments on this machine, and one HTML page that shows them. The main job of `make demo`."""
