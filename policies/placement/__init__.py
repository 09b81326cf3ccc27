"""Where new copies go: one algorithm a file."""
