"""The report: experiments on this machine, and one HTML page that shows them. `make demo` runs it."""
