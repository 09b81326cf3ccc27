"""Which inference worker runs a request, and whether one runs all of it: one algorithm a file."""
